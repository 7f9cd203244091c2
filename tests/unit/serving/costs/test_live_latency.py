"""Costs of steps as live steps show them."""

from __future__ import annotations

import pytest

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.latency import LatencyModel, guessed
from distillspec.serving.costs.live_latency import LiveLatency, RowWork
from distillspec.serving.costs.table import CostTable

COSTS = LatencyModel(CostTable(((1.0, 0.02), (8.0, 0.022), (64.0, 0.07))), CostTable(((1.0, 2e-3), (8.0, 3e-3))))


def observe(
    live: LiveLatency,
    lengths: list[int],
    *,
    unread: int = 1,
    prompts: int = 0,
    factor: float = 1.0,
    drafts_block: bool = False,
) -> bool:
    """Show it a step that took what `COSTS` say, times `factor`."""
    contexts, costs = [100] * len(lengths), COSTS.of_draft(drafts_block=drafts_block)
    draft_s = costs.draft_s(contexts, lengths) + costs.catch_up_s([unread for k in lengths if k])
    target_s = costs.target_s(contexts, lengths, prompts)
    rows = [RowWork(100, length, unread, drafts_block=drafts_block) for length in lengths]
    return live.observe(rows, prompts, factor * target_s, {DRAFT: factor * draft_s})


def test_measured_costs_are_those_of_the_first_steps_and_follow_them() -> None:
    live = LiveLatency(COSTS)
    assert live.latency == COSTS
    assert observe(live, [2, 0, 1])
    assert live.latency.step_s([100] * 3, [2, 0, 1]) == pytest.approx(COSTS.step_s([100] * 3, [2, 0, 1]), rel=0.02)
    for _ in range(40):
        observe(live, [2, 0, 1], factor=1.5)
    assert live.latency.step_s([100] * 3, [2, 0, 1]) == pytest.approx(
        1.5 * COSTS.step_s([100] * 3, [2, 0, 1]), rel=0.03
    )


@pytest.mark.parametrize("drafts_block", [False, True])
def test_catch_up_and_prompts_are_counted_as_the_passes_they_are(drafts_block: bool) -> None:
    live = LiveLatency(COSTS)
    for _ in range(20):
        for unread, prompts in ((4, 40), (30, 0), (1, 20)):
            observe(live, [3, 3], unread=unread, prompts=prompts, drafts_block=drafts_block)
    for tokens in (1, 2, 8, 20):
        assert live.latency.draft is not None
        assert COSTS.draft is not None
        assert live.latency.draft.seconds(0, tokens) == pytest.approx(COSTS.draft.seconds(0, tokens), rel=0.03)
    assert live.latency.prompts_s(2, 30) == pytest.approx(COSTS.prompts_s(2, 30), rel=0.03)


def test_reading_for_rows_that_do_not_draft_yet_is_no_cost_of_drafting() -> None:
    """One row drafts three tokens, while the draft reads on in a text of 300."""
    live = LiveLatency(COSTS)
    assert COSTS.draft is not None
    draft_s = COSTS.draft_s([100, 400], [3, 0]) + COSTS.draft.seconds(0, 299)
    for _ in range(40):
        live.observe(
            [RowWork(100, 3, 1), RowWork(400, 0, 300)], 0, COSTS.target_s([100, 400], [3, 0]), {DRAFT: draft_s}
        )
    assert live.latency.draft is not None
    assert live.latency.draft.seconds(0, 1) == pytest.approx(COSTS.draft.seconds(0, 1), rel=0.05)


def test_a_draft_that_was_never_measured_is_as_much_faster_than_guessed_as_the_target() -> None:
    live, guess = LiveLatency(None), guessed()
    assert live.latency == guess
    assert guess.draft is not None
    assert not observe(live, [0, 0], factor=0.1)
    assert live.latency.draft is not None
    factor = 0.1 * COSTS.target_s([100, 100], [0, 0]) / guess.target_s([100, 100], [0, 0])
    assert live.latency.draft.seconds(0, 1) == pytest.approx(factor * guess.draft.seconds(0, 1), rel=0.05)


def test_without_a_draft_model_only_the_target_is_learnt() -> None:
    live = LiveLatency(COSTS, drafts_with_model=False)
    observe(live, [1, 1], factor=9.0)
    assert live.latency.draft is None
    assert live.latency.target.seconds(0, 4) > COSTS.target.seconds(0, 4)


def test_a_draft_of_the_same_size_keeps_what_was_learnt_and_another_is_guessed_by_its_size() -> None:
    assert COSTS.draft is not None
    pool = LatencyModel(COSTS.target, COSTS.draft, members={"a": COSTS.draft, "b": COSTS.draft.scaled(4.0)})
    live = LiveLatency(pool)
    live.draft_changed(DraftChange("b", None, "b"))
    assert live.latency.members == pool.members
    live.draft_changed(DraftChange("c", None, "b", 0.5))
    live.draft_changed(DraftChange("a", None, "a", 3.0))
    found = live.latency.members
    assert found["c"].seconds(0, 1) == pytest.approx(2 * COSTS.draft.seconds(0, 1))
    assert found["a"].seconds(0, 1) == pytest.approx(3 * COSTS.draft.seconds(0, 1))
    assert found["b"] == pool.members["b"]


def test_a_draft_that_comes_later_than_the_measured_costs_is_no_free_one() -> None:
    live = LiveLatency(LatencyModel(COSTS.target))
    assert live.latency.draft is not None
    first = live.latency.draft.seconds(0, 1)
    assert first > 5e-4
    for _ in range(60):
        observe(live, [2, 2])
    assert live.latency.draft is not None
    assert COSTS.draft is not None
    assert live.latency.draft.seconds(0, 2) == pytest.approx(COSTS.draft.seconds(0, 2), rel=0.2)
