"""Where several sources could draft for a row, the one that earns most does."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.rows import BatchView, Option, RowView, evidence
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.offers import Offer
from distillspec.serving.planning.step_planner import StepPlanner

COSTS = LatencyModel(CostTable.line(0.0, 1e-3, 3e-2), CostTable.line(0.0, 1e-4, 4e-3))
MODEL = Option(4, wide=True)
ROW = RowView("a", 100, 4, drafted_by_model=False, match=8, source="lookup", others=(MODEL,))


def learnt(lookup: float, model: float) -> AcceptanceEstimate:
    """An estimate that has seen so much of each accepted."""
    estimate = AcceptanceEstimate(4, width=2)
    for turn in range(200):
        rows = [RowResult.chain("x", 4, 4 * ((turn * share) % 1 < share), 5) for share in (lookup, model)]
        estimate.observe(rows, [evidence(ROW), 0])
    return estimate


def chosen(row: RowView, acceptance: AcceptanceEstimate, costs: LatencyModel = COSTS) -> Offer:
    return StepPlanner([row], 4, acceptance, costs).at_best_price().plan([row]).chosen[0]


@pytest.mark.parametrize(
    ("lookup", "model", "source"), [(0.9, 0.5, "lookup"), (0.05, 0.6, "draft"), (0.5, 0.5, "lookup")]
)
def test_the_source_that_earns_more_is_taken(lookup: float, model: float, source: str) -> None:
    row = chosen(ROW, learnt(lookup, model)).row
    assert row.source == source
    assert row.drafted_by_model == row.wide == (source == "draft")
    assert row.match == (8 if source == "lookup" else 0)
    assert (row.sequence_id, row.context_tokens, row.others) == ("a", 100, ())


def test_a_dear_draft_is_left_where_a_lookup_comes_free() -> None:
    dear = replace(COSTS, draft=CostTable.line(0.0, 1e-3, 3e-2))
    estimate = learnt(0.3, 0.6)
    assert chosen(ROW, estimate).row.source == "draft"
    assert chosen(ROW, estimate, dear).row.source == "lookup"


def test_a_short_lookup_gives_way_to_a_longer_draft() -> None:
    one = ROW._replace(limit=1)
    estimate = learnt(0.8, 0.75)
    assert chosen(ROW, estimate).row.source == "lookup"
    assert chosen(one, estimate).row.source == "draft"


def test_the_controller_plans_for_the_chosen_source_and_learns_of_it() -> None:
    controller = GoodputController(4, COSTS, acceptance=learnt(0.05, 0.7))
    plan = controller.plan(BatchView((ROW, RowView("b", 100, 4))))
    assert [tree.source for row in plan.rows for tree in row.trees] == ["draft", "draft"]
    assert plan.why.rows[0].source == "draft"
    assert plan == controller.plan(BatchView((ROW, RowView("b", 100, 4))))
