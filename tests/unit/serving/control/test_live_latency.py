"""Costs of steps as live steps show them."""

from __future__ import annotations

import pytest

from distillspec.serving.control.base import BatchView, Plan, RowResult, RowView, StepResult
from distillspec.serving.control.live_latency import LiveLatency
from distillspec.serving.costs.latency import LatencyModel, guessed
from distillspec.serving.costs.table import CostTable

COSTS = LatencyModel(CostTable(((1.0, 0.02), (8.0, 0.022), (64.0, 0.07))), CostTable(((1.0, 2e-3), (8.0, 3e-3))))


def step(lengths: list[int], *, unread: int = 1, prompts: int = 0, factor: float = 1.0) -> StepResult:
    """Return a step that took what `COSTS` say, times `factor`."""
    rows = tuple(RowView(f"r{i}", 100, 8, unread_tokens=unread) for i in range(len(lengths)))
    draft_s = COSTS.draft_s([100] * len(lengths), lengths)
    draft_s = factor * (draft_s + COSTS.catch_up_s([unread for k in lengths if k]))
    target_s = factor * COSTS.target_s([100] * len(lengths), lengths, prompts)
    results = tuple(RowResult.chain(row.sequence_id, k, 0, 1) for row, k in zip(rows, lengths, strict=True))
    return StepResult(results, BatchView(rows, prompts), Plan(()), prompts, draft_s, target_s, draft_s + target_s)


def test_measured_costs_are_those_of_the_first_steps_and_follow_them() -> None:
    live = LiveLatency(COSTS)
    assert live.latency == COSTS
    assert live.observe(step([2, 0, 1]), [2, 0, 1])
    assert live.latency.step_s([100] * 3, [2, 0, 1]) == pytest.approx(COSTS.step_s([100] * 3, [2, 0, 1]), rel=0.02)
    for _ in range(40):
        live.observe(step([2, 0, 1], factor=1.5), [2, 0, 1])
    assert live.latency.step_s([100] * 3, [2, 0, 1]) == pytest.approx(
        1.5 * COSTS.step_s([100] * 3, [2, 0, 1]), rel=0.03
    )


def test_catch_up_and_prompts_are_counted_as_the_passes_they_are() -> None:
    live = LiveLatency(COSTS)
    for _ in range(20):
        for unread, prompts in ((4, 40), (30, 0), (1, 20)):
            live.observe(step([3, 3], unread=unread, prompts=prompts), [3, 3])
    for tokens in (1, 2, 8, 20):
        assert live.latency.draft is not None
        assert COSTS.draft is not None
        assert live.latency.draft.seconds(0, tokens) == pytest.approx(COSTS.draft.seconds(0, tokens), rel=0.03)
    assert live.latency.prompts_s(2, 30) == pytest.approx(COSTS.prompts_s(2, 30), rel=0.03)


def test_a_draft_that_was_never_measured_is_as_much_faster_than_guessed_as_the_target() -> None:
    live, guess = LiveLatency(None), guessed()
    assert live.latency == guess
    assert guess.draft is not None
    plain = step([0, 0], factor=0.1)
    assert not live.observe(plain, [0, 0])
    assert live.latency.draft is not None
    factor = plain.target_s / guess.target_s([100, 100], [0, 0])
    assert live.latency.draft.seconds(0, 1) == pytest.approx(factor * guess.draft.seconds(0, 1), rel=0.05)


def test_a_step_whose_rows_are_not_those_of_its_view_teaches_nothing() -> None:
    live = LiveLatency(COSTS)
    assert not live.observe(step([1, 1], factor=9.0), [1])
    assert live.latency == COSTS
    assert LiveLatency(COSTS, drafts_with_model=False).latency.draft is None
