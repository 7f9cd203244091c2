"""Tables fitted to timed passes: what is found, what is never said, and how far off they are."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.serving.base.ladder import Ladder
from distillspec.serving.costs.fitted import Timed, fit
from distillspec.serving.costs.table import CostTable


def timed(cost: CostTable, noise: float = 0.0) -> list[Timed]:
    """Return a grid of points whose seconds follow `cost`, every fourth held out."""
    generator = numpy.random.default_rng(0)
    works = [(c * r, r * k) for c in (50, 400) for r in (1, 4, 8) for k in (1, 3, 5)]
    return [
        Timed(c, t, 1, cost.seconds(c, t) * float(generator.normal(1, noise)), 0, i % 4 == 0)
        for i, (c, t) in enumerate(works)
    ]


def test_costs_are_found_and_judged_on_points_they_never_saw() -> None:
    cost = CostTable.line(1e-5, 1e-3, 2e-2)
    exact = fit(timed(cost))
    assert exact.held_out_error < 1e-6
    assert [exact.cost.seconds(90, n) for n in (1, 11, 40)] == pytest.approx([cost.seconds(90, n) for n in (1, 11, 40)])
    noisy = fit(timed(cost, noise=0.05))
    assert 0.002 < noisy.held_out_error < 0.1
    spoilt = [replace(p, seconds=2 * p.seconds) if p.held_out else p for p in timed(cost)]
    assert fit(spoilt).held_out_error == pytest.approx(0.5, abs=1e-6)  # the fit did not see them


def test_no_cost_is_negative() -> None:
    falling = [Timed(100, tokens, 1, 1 / tokens) for tokens in (1, 2, 4)]
    cost = fit(falling).cost
    assert cost.seconds(0, 1) == pytest.approx(cost.seconds(0, 4))


def test_costs_of_rows_are_fitted_where_they_matter() -> None:
    """The same number of tokens in few rows, and in many."""
    works = [(n, rows) for n in (4, 8, 16, 32) for rows in (1, 2, 4)]

    def points(per_row: float) -> list[Timed]:
        noise = numpy.random.default_rng(0)
        return [
            Timed(100 * rows, n, 1, (2e-2 + 1e-3 * n + per_row * rows) * float(noise.normal(1, 0.01)), rows)
            for n, rows in works
        ]

    assert fit(points(5e-3)).cost.per_row + 100 * fit(points(5e-3)).cost.per_context == pytest.approx(5e-3, rel=0.1)
    assert fit(points(0.0)).cost.per_row < 5e-4


def test_what_a_first_pass_takes_more_is_fitted_where_loops_differ() -> None:
    pass_s, first_s = 1e-3, 3e-3
    loops = [(rows, length) for rows in (1, 4, 8) for length in (1, 4)]
    points = [Timed(0, rows * k, k, first_s + k * pass_s * (1 + rows / 8), rows * k) for rows, k in loops]
    found = fit(points)
    assert found.cost.first == pytest.approx(first_s, rel=0.01)
    assert found.held_out_error < 1e-6
    assert fit([point for point in points if point.passes == 4]).cost.first == 0


def test_passes_that_no_line_follows_are_fitted_by_the_number_of_tokens() -> None:
    def seconds(tokens: int) -> float:
        return 0.05 if tokens == 1 else 0.07 if tokens <= 8 else 0.1 if tokens <= 24 else 0.13

    points = [
        Timed(context, tokens, 1, seconds(tokens) + 1e-5 * context, 1, (i + j) % 5 == 0)
        for i, context in enumerate((50, 400, 1000, 2000))
        for j, tokens in enumerate((1, 2, 3, 4, 5, 8, 9.5, 12, 24, 29, 40))
    ]
    bent = fit(points)  # type: ignore[arg-type]
    assert bent.held_out_error < 0.001
    assert bent.cost.seconds(0, 30) == pytest.approx(0.13)


def test_no_profile_says_that_more_tokens_cost_less() -> None:
    """Measured on a server with AVX512-BF16: a pass over two tokens took 0.77 of one over one."""
    times = {1: 0.1, 2: 0.077, 3: 0.12, 4: 0.115, 8: 0.2, 16: 0.19}
    points = [Timed(c, tokens, 1, s + 1e-5 * c) for c in (50, 400, 1000) for tokens, s in times.items()]
    seconds = [fit(points).cost.seconds(0, tokens) for tokens in range(1, 20)]
    assert seconds == pytest.approx(numpy.maximum.accumulate(seconds).tolist())
    assert seconds[0] == pytest.approx(seconds[1])
    assert 0.077 < seconds[0] < 0.1  # as near as one number comes to both


def test_a_table_of_recorded_passes_is_fitted_to_what_they_compute() -> None:
    """A pass over five tokens runs as eight, so it shows what eight cost."""
    ladder, truth = Ladder((1, 2, 8, 16)), CostTable.line(1e-5, 1e-3, 1e-2)
    points = [
        Timed(context, ladder.up(n), 1, truth.seconds(context, ladder.up(n)), 1, n == 12)
        for context in (50, 400, 1000)
        for n in (1, 2, 5, 8, 12, 16)
    ]
    found = fit(points, ladder)
    assert found.held_out_error < 1e-6
    for tokens in (1, 5, 8, 9, 16):
        assert found.cost.seconds(70, tokens) == pytest.approx(truth.seconds(70, ladder.up(tokens)), rel=1e-6)


@pytest.mark.parametrize("points", [[], [Timed(1, 1, 1, 0.0)], [Timed(1, 1, 1, -1.0)]])
def test_nothing_to_fit_is_an_error(points: list[Timed]) -> None:
    with pytest.raises(ValueError, match="nothing to fit"):
        fit(points)
