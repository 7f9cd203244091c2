"""Seconds of a planned step: as `LatencyModel` has them, each draft by its own costs."""

from __future__ import annotations

import pytest

from distillspec.serving.base.catch_up import READ_WITH_DRAFTING
from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.base.shape import TreeShape, chain_shape
from distillspec.serving.base.tree import NGRAM
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.step_costs import PAY_BACK_STEPS, StepCosts
from distillspec.serving.costs.table import CostTable

TARGET = CostTable(((1.0, 1.0), (4.0, 1.1), (9.0, 3.0)), 0.01, 0.1)
DRAFT = CostTable(((1.0, 0.1), (2.0, 0.3), (3.0, 0.35)), 0.002, 0.05, 0.04)
COSTS = LatencyModel(TARGET, DRAFT, 0.07, members={"b": DRAFT.scaled(2.0)})
ROWS = [RowView("0", 30, 4), RowView("1", 50, 4), RowView("2", 9, 4)]


def chains(*lengths: int) -> list[tuple[RowView, TreeShape]]:
    return [(row, chain_shape(length)) for row, length in zip(ROWS, lengths, strict=True)]


@pytest.mark.parametrize("lengths", [(0, 0, 0), (1, 0, 3), (2, 2, 2)])
def test_chains_take_what_the_latency_model_says(lengths: tuple[int, ...]) -> None:
    wanted = COSTS.step_s([30, 50, 9], lengths)
    assert StepCosts(COSTS, 3).step_s(chains(*lengths), sum(lengths)) == pytest.approx(wanted)


def test_prompt_tokens_only_make_further_ones_dearer() -> None:
    beside = StepCosts(COSTS, 3, 4)
    assert beside.step_s(chains(0, 0, 0), 0) == pytest.approx(COSTS.step_s([30, 50, 9], [0, 0, 0]))
    assert beside.nodes_s(2) == pytest.approx(TARGET.seconds(0, 9) - TARGET.seconds(0, 7))
    assert StepCosts(COSTS, 3).nodes_s(2, 4) == pytest.approx(beside.nodes_s(2))
    assert beside.nodes_s(0) == 0.0


def test_each_draft_has_its_own_passes_and_all_other_sources_cost_once() -> None:
    named = LikelyNodes(NGRAM, (0.5,), (-1,), (1,))
    costs, plain_s = StepCosts(COSTS, 4), TARGET.seconds(4 * 10, 4, 4)
    trees = [
        (RowView("0", 10, 4), chain_shape(2)),
        (RowView("1", 10, 4, source="b"), chain_shape(1)),
        (RowView("2", 10, 4, False, source="lookup"), chain_shape(3)),
        (RowView("3", 10, 4, likely=named), TreeShape()),  # a draft behind nodes, which drafts nothing
    ]
    drafting_s = COSTS.draft_s([10], [2]) + COSTS.of_draft("b").draft_s([10], [1]) + 0.07
    assert costs.step_s(trees, 7) == pytest.approx(plain_s + costs.nodes_s(7) + drafting_s)


def test_a_source_without_a_model_is_charged_its_rows_share() -> None:
    costs = StepCosts(COSTS, 3)
    lookup = costs.of_trees(ROWS[:2], Option(4, False, source="lookup"), 4, 4, 0)
    assert (lookup.drafts, lookup.draft_free_s) == (False, pytest.approx(0.07 * 2 / 3))
    model = costs.of_trees(ROWS[:2], Option(4, source="b"), 4, 4, 1)
    assert model.drafts
    assert model.target_s[2] == pytest.approx(TARGET.seconds(0, 6) - TARGET.seconds(0, 4))
    assert model.pass_s[2] == pytest.approx(0.6)


def test_long_texts_are_read_by_drafts_alone_and_paid_back_in_what_is_left() -> None:
    costs, late = StepCosts(COSTS, 3), Option(4, unread_tokens=200)
    assert costs.reading_s(late) == pytest.approx(COSTS.reading_s(200))
    assert costs.reading_s(late) > 0
    assert costs.reading_s(late._replace(unread_tokens=READ_WITH_DRAFTING)) == 0
    assert costs.reading_s(late._replace(drafted_by_model=False)) == 0
    assert costs.paid_back_s(late, 5.0) == pytest.approx(costs.reading_s(late) / 5)
    assert costs.paid_back_s(late, 1e9) == pytest.approx(costs.reading_s(late) / PAY_BACK_STEPS)
