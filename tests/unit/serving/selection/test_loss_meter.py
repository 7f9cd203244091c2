"""Losses are measured against what the best draft would have brought all rows of a step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.loss_meter import LossMeter
from distillspec.serving.selection.losses import Losses
from distillspec.serving.selection.rewards import row_rewards

from .steps import COSTS, TARGET, verified

BRINGS = {"a": (3, 3), "dear": (0, 1)}  # tokens drafted, and written
ALONE = {"1/0": "a", "2/0": "a"}
MIXED = {"1/0": "a", "2/0": "dear"}


def best_tokens_a_second(rows: int) -> float:
    """Of each of so many rows, all with a."""
    drafted, written = BRINGS["a"]
    return written / (TARGET.seconds(0, rows * (1 + drafted)) + COSTS.of_draft("a").loop_s(rows, 0, drafted))


def count(
    meter: LossMeter, chosen: Mapping[str, str | None], on_trial: tuple[str, ...] = (), readings_s: float = 0.0
) -> Losses:
    """Count a step. Return what it added."""
    before = meter.losses.trials or 0.0, meter.losses.regret or 0.0
    result = verified(chosen, BRINGS, readings_s)
    meter.count(result, row_rewards(result, chosen), on_trial)
    assert meter.losses.trials is not None
    assert meter.losses.regret is not None
    return Losses(meter.losses.trials - before[0], meter.losses.regret - before[1])


def close(trials: float, regret: float) -> Losses:
    return Losses(pytest.approx(trials, abs=1e-9), pytest.approx(regret, abs=1e-9))


def test_the_best_draft_alone_loses_nothing_but_reading_ahead() -> None:
    meter = LossMeter(lambda: COSTS)
    assert count(meter, ALONE) == close(0.0, 0.0)
    assert count(meter, ALONE, readings_s=0.01) == close(0.0, 0.01 * 2 * best_tokens_a_second(2))


def test_a_trial_costs_what_all_rows_would_have_written_more_with_the_best_draft_in_the_same_seconds() -> None:
    """Beside a row that drafts nothing, the target's pass is shorter than it would be with a for all rows."""
    meter = LossMeter(lambda: COSTS)
    truly = verified(MIXED, BRINGS).total_s * 2 * best_tokens_a_second(2) - (3 + 1)
    assert truly > 0.5
    for _ in range(3):
        assert count(meter, MIXED, on_trial=("2/0",)) == close(truly, truly)
    assert count(meter, MIXED) == close(0.0, truly), "a bad choice, but no trial"


def test_other_rows_on_a_bad_draft_are_not_the_doing_of_a_trial() -> None:
    meter = LossMeter(lambda: COSTS)
    count(meter, ALONE)
    both = {"1/0": "dear", "2/0": "dear"}
    own = count(meter, both, on_trial=("2/0",))
    assert own.regret is not None
    assert own == close(own.regret / 2, own.regret)
    assert own.regret == pytest.approx(TARGET.seconds(0, 2) * 2 * best_tokens_a_second(2) - 2)


def test_nothing_is_lost_before_two_drafts_are_known_and_after_the_best_is_another() -> None:
    meter = LossMeter(lambda: COSTS)
    assert count(meter, {"1/0": "dear"}, on_trial=("1/0",)) == close(0.0, 0.0)
    count(meter, {"1/0": "a"})
    assert (count(meter, {"1/0": "dear"}).regret or 0.0) > 0.1
    meter.forget("a")
    assert count(meter, {"1/0": "dear"}) == close(0.0, 0.0)


def test_rows_without_a_draft_are_left_out() -> None:
    assert count(LossMeter(lambda: COSTS), {"1/0": None}, on_trial=("1/0",)) == close(0.0, 0.0)


def test_a_draft_whose_passes_are_said_to_take_no_time_counts_by_what_they_took() -> None:
    """Where passes are lost in the noise of the target's, a learnt table may say so."""
    free = replace(COSTS, members={**COSTS.members, "a": CostTable.line(0.0, 0.0, 0.0)})
    meter, known = LossMeter(lambda: free), LossMeter(lambda: COSTS)
    found, usual = count(meter, MIXED, on_trial=("2/0",)), count(known, MIXED, on_trial=("2/0",))
    assert found.regret is not None
    assert usual.regret is not None
    assert found.regret >= usual.regret > 0
