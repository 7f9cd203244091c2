"""Stages put their figures where they belong, once, in this process or in others."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from distillspec.recipes.spin.stages import Stage, fill


@pytest.mark.parametrize("jobs", [1, 2])
def test_figures_are_the_same_in_any_number_of_processes(jobs: int) -> None:
    stages = [Stage(("powers", str(base)), partial(pow, base, 2)) for base in range(3)]
    figures: dict[str, Any] = {}
    seen: list[int] = []
    fill(figures, [*stages, Stage(("sum",), partial(sum, (1, 2)))], jobs, lambda: seen.append(len(str(figures))))
    assert figures == {"powers": {"0": 0, "1": 1, "2": 4}, "sum": 3}
    assert len(seen) == 4, "each is written when it is known"
    assert seen == sorted(seen)


def test_what_is_known_is_not_simulated_again() -> None:
    figures: dict[str, Any] = {"machines": {"a": {"parts": 1}}}
    stages = [Stage(("machines", "a", what), partial(int, "7")) for what in ("parts", "memory")]
    assert [stage.is_in(figures) for stage in stages] == [True, False]
    fill(figures, stages, 1, lambda: None)
    assert figures == {"machines": {"a": {"parts": 1, "memory": 7}}}


@pytest.mark.parametrize("jobs", [1, 2])
def test_a_stage_that_fails_ends_the_study(jobs: int) -> None:
    stages = [Stage((str(place),), partial(divmod, 1, 0)) for place in range(2)]
    with pytest.raises(ZeroDivisionError):
        fill({}, stages, jobs, lambda: None)
