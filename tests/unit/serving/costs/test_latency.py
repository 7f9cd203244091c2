"""Costs of passes and steps: counted by definition, impossible ones refused."""

from __future__ import annotations

from itertools import product

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.ladder import Ladder, Recorded
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.latency import LatencyModel, draft_work
from distillspec.serving.costs.table import CostTable

from ..machine import CPU


def test_costs_count_roots_and_a_draft_batch_that_shrinks() -> None:
    latency = LatencyModel(CostTable.line(0.5, 2.0, 10.0), CostTable.line(0.25, 1.0, 3.0))
    # Target: 30 context, 2 roots and 3 drafted. Draft: depth 1 both rows, depth 2 the first alone.
    assert latency.step_s([10, 20], [2, 1]) == (15 + 10 + 10) + (0.25 * 30 + 2 + 3) + (2.5 + 1 + 3)
    assert latency.step_s([10], [0], prefill_tokens=4) == 5 + 2 * 5 + 10
    assert LatencyModel(CostTable.line(0, 0, 1.0), None, 0.125).step_s([1], [3]) == 1.125
    free = LatencyModel(latency.target, None, 0.125)
    for model, length in product((latency, free), range(4)):
        assert model.alike_s(3, 60, length) == model.step_s([10, 20, 30], [length] * 3)


def test_a_draft_that_is_another_costs_by_its_size() -> None:
    dear, cheap = CostTable.line(0, 0, 4.0), CostTable.line(0, 0, 1.0)
    latency = LatencyModel(cheap, cheap, members={"a": cheap, "b": dear})
    for change, wanted in {
        DraftChange("b", None, "b", 0.5): 2.0,  # in its own place
        DraftChange("new", None, "a", 3.0): 3.0,
        DraftChange("b"): 4.0,  # gone, or nothing is known
    }.items():
        table = latency.changed(change).table_of(change.source)
        assert table is not None
        assert table.seconds(0, 1) == wanted
    assert latency.changed(DraftChange("new", None, "a", 3.0)).table_of("a") == cheap


def test_draft_passes_shrink_with_their_rows() -> None:
    draft = CostTable(((1.0, 1.0), (2.0, 1.5), (3.0, 4.0)), 0.0, 0.25)
    latency = LatencyModel(CostTable.line(0, 0, 0), draft)
    assert latency.draft_s([5, 5, 5], [3, 1, 2]) == pytest.approx(4 + 1.5 + 1 + 6 * 0.25)
    assert draft_work([5, 6, 7], [3, 1, 2], drafts_block=False) == ([3, 2, 1], 15 + 6 + 14, 6)


@pytest.mark.parametrize("drafts_block", [False, True])
def test_trees_cost_what_the_draft_reads_of_them(drafts_block: bool) -> None:
    latency = LatencyModel(
        CostTable.line(0, 0, 0), CostTable(((1.0, 1.0), (2.0, 1.5)), 0.5, 0.25, 4.0), drafts_block=drafts_block
    )
    chains = [(5, (1, 1, 1)), (6, (1,))]
    assert latency.trees_s(chains) == latency.draft_s([5, 6], [3, 1])
    if not drafts_block:
        assert latency.trees_s([(5, (1, 2))]) == latency.trees_s([(5, (1, 1))]) + 0.5


@pytest.mark.parametrize("drafts_block", [False, True])
def test_a_first_pass_takes_longer_than_the_others(drafts_block: bool) -> None:
    plain, draft = (CostTable.rising(((1.0, 1.0), (2.0, 1.5)), first=first) for first in (0.0, 4.0))
    dear, cheap = (LatencyModel(CostTable.line(0, 0, 0), own, drafts_block=drafts_block) for own in (draft, plain))
    assert dear.draft_s([5, 5], [0, 0]) == 0
    assert dear.draft_s([5, 5], [3, 1]) == cheap.draft_s([5, 5], [3, 1]) + 4
    assert dear.loop_s(2, 10, 3) == cheap.loop_s(2, 10, 3) + 4 == dear.draft_s([5, 5], [3, 3])
    assert dear.catch_up_s([1, 1]) == cheap.catch_up_s([1, 1])
    assert draft.scaled(0.5).first == 2


def test_a_block_is_one_pass_over_the_rows_that_draft_as_deep_as_the_deepest() -> None:
    draft = CostTable.line(0.25, 1.0, 3.0)
    latency = LatencyModel(CostTable.line(0.5, 2.0, 10.0), draft, drafts_block=True)
    assert draft_work([10, 20, 30], [3, 0, 1], drafts_block=True) == ([6], 40, 2)
    assert latency.draft_s([10, 20, 30], [3, 0, 1]) == 0.25 * 40 + 6 + 3
    assert latency.draft_s([10, 20], [0, 0]) == 0
    assert latency.draft_s([10, 20, 30], [3, 2, 1], [True, True, False]) == 0.25 * 30 + 6 + 3 + latency.draft_free_s
    assert latency.of_draft(drafts_block=False).draft_s([10, 20, 30], [3, 0, 1]) == 0.25 * 60 + 4 + 3 * 3
    for length in range(4):
        assert latency.alike_s(3, 60, length) == latency.step_s([10, 20, 30], [length] * 3)


def test_prompts_share_the_pass_of_the_rows() -> None:
    latency = LatencyModel(CostTable(((1.0, 1.0), (5.0, 1.0), (105.0, 3.0))))
    assert latency.target_s([10, 20], [1, 0], prefill_tokens=52) == pytest.approx(2.0)
    assert latency.prompts_s(2, 53) == pytest.approx(1.0)
    assert latency.prompts_s(0, 55) == pytest.approx(2.0)
    assert latency.prompts_s(2, 0) == 0


def test_impossible_settings_are_refused_by_name() -> None:
    for make, name in (
        (lambda: CostTable.line(-1, 0, 0), "per_context=-1"),
        (lambda: CostTable.line(0, float("nan"), 0), "per_token=nan"),
        (lambda: LatencyModel(CPU.target, draft_free_s=-1.0), r"draft_free_s=-1\.0"),
        (lambda: GoodputController(-1), "speculation_length=-1"),
        (lambda: AcceptanceEstimate(4, prior=1.0), r"prior=1\.0"),
    ):
        with pytest.raises(ConfigError, match=name):
            make()


def test_recorded_passes_of_target_and_drafts_have_ladders_of_their_own() -> None:
    """Seven rows that draft two tokens each: 21 tokens of the target run as 24, and seven of each draft as eight."""
    line = CostTable.line(0.0, 1.0, 10.0)
    latency = LatencyModel(line, line, members={"b": line}).recorded_in(Recorded(Ladder((7, 24)), Ladder((8,))))
    assert latency.target_s([5] * 7, [2] * 7) == pytest.approx(34)
    assert latency.target_s([5] * 7, [0] * 7) == pytest.approx(17)
    assert latency.draft_s([5] * 7, [2] * 7) == pytest.approx(2 * 18)
    assert latency.of_draft("b").draft_s([5] * 7, [2] * 7) == pytest.approx(2 * 18)
    assert latency.prompts_s(7, 3) == pytest.approx(34 - 17)
    assert latency.prompts_s(7, 100) == pytest.approx(117 - 17), "so many are not recorded"
