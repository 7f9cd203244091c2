"""Texts that drafts are far behind in are read where that pays in what is left to write."""

from __future__ import annotations

import pytest

from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.speculation_policy import SpeculationPolicy
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.step_planner import StepPlanner

COSTS = LatencyModel(CostTable.line(0.0, 2e-4, 9e-3), CostTable.line(0.0, 7e-5, 3e-4))
MANY = 10_000


def rows(unread: int, room: int, count: int = 4) -> tuple[RowView, ...]:
    return tuple(RowView(str(place), 300, 4, unread_tokens=unread, room=room) for place in range(count))


@pytest.mark.parametrize(
    ("unread", "room", "drafts"), [(1, 8, True), (300, 8, False), (300, MANY, True), (3000, MANY, False)]
)
def test_a_draft_reads_a_long_text_only_for_enough_tokens(unread: int, room: int, drafts: bool) -> None:
    controller = GoodputController(4, COSTS)
    decision = controller.decide(BatchView(rows(unread, room)))
    assert any(decision.lengths) == drafts
    assert (decision.mode == "speculating") == drafts


def test_rows_that_have_been_read_go_on_beside_one_that_is_not_worth_reading() -> None:
    controller = GoodputController(4, COSTS)
    late = RowView("late", 300, 4, unread_tokens=300, room=6)
    decision = controller.decide(BatchView((*rows(1, MANY, 3), late)))
    assert min(decision.lengths[:3]) > 0
    assert decision.lengths[3] == 0


def test_one_answer_that_ends_soon_keeps_no_other_from_drafting() -> None:
    late = RowView("late", 300, 4, unread_tokens=300, room=8)
    decision = GoodputController(4, COSTS).decide(BatchView((*rows(300, MANY, 3), late)))
    assert min(decision.lengths[:3]) > 0
    assert decision.lengths[3] == 0


def test_a_longer_plan_to_learn_costs_from_reads_no_text() -> None:
    def explored(behind: RowView) -> list[int]:
        own = [RowView("read", 300, 4, unread_tokens=2), behind]
        planner = StepPlanner(own, 4, AcceptanceEstimate(4), COSTS, trees=None).at_best_price()
        best = planner.chains(own, [1, 0])
        mode, plan = SpeculationPolicy().choose(own, planner, best, planner.plain(own), explores=1)
        assert mode == "exploring"
        return plan.depths

    assert explored(RowView("behind", 300, 4, unread_tokens=200)) == [2, 0]
    assert explored(RowView("near", 300, 4, unread_tokens=2)) == [2, 1]
    assert explored(RowView("without a model", 300, 4, False, unread_tokens=200)) == [2, 1]


def test_a_draft_beside_likely_nodes_reads_no_text_that_ends_soon() -> None:
    def drafts(room: int) -> bool:
        controller = GoodputController(4, COSTS)
        named = Option(4, False, source="ngram", likely=LikelyNodes("ngram", (0.1,), (-1,), (1,)))
        own = [row._replace(others=(named,)) for row in rows(100, room)]
        decision = controller.decide(BatchView(tuple(own)))
        return any(row.drafted_by_model and length for row, length in zip(decision.rows, decision.lengths, strict=True))

    assert drafts(MANY)
    assert not drafts(8)
