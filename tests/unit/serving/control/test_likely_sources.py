"""Decisions at a price: how long a list holds, and what is learnt from the steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView, without_likely
from distillspec.serving.base.tree import DRAFT, NGRAM
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.likely_sources import SECOND_EVERY, LikelySources
from distillspec.serving.control.likely_sources_rest import REST_STEPS
from distillspec.serving.control.reused_plan import HOLD_STEPS, ReusedPlan
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.step_planner import StepPlanner

COSTS = LatencyModel(CostTable.line(0.0, 3e-4, 3e-2), CostTable.line(0.0, 1e-4, 3e-3), draft_free_s=1e-4)


def view(*chances: float, names: str = "a", context: int = 100) -> BatchView:
    nodes = LikelyNodes(NGRAM, chances, tuple(range(-1, len(chances) - 1)), tuple(range(1, len(chances) + 1)))
    row = RowView("", context, 4, False, source=NGRAM, likely=nodes, others=(Option(4),))
    return BatchView(tuple([row._replace(sequence_id=name) for name in names]))


def step(
    controller: GoodputController, seen: BatchView, accept: Callable[[RowPlan], RowResult] | None = None
) -> StepResult:
    """Take a step in which half of the levels are accepted, or what `accept` says."""
    plan = controller.plan(seen)
    trees = [tree for row in plan.rows for tree in row.trees]
    nodes = sum(tree.shape.nodes for tree in trees)
    rows = tuple(map(accept or halved, plan.rows))
    drafts = any(tree.source == DRAFT for tree in trees)
    result = StepResult(rows, seen, plan, 0, 3e-3 * drafts, 3e-2 + 3e-4 * nodes, 3e-2 + 3e-4 * nodes + 3e-3 * drafts)
    controller.observe(result)
    return result


def halved(plan: RowPlan) -> RowResult:
    """Return what a row gives that half of the levels are accepted of."""
    depth, nodes = plan.speculation_length, sum(tree.shape.nodes for tree in plan.trees)
    return RowResult.chain(plan.sequence_id, depth, depth // 2, 1 + depth // 2)._replace(nodes=nodes)


def kept(plan: RowPlan) -> RowResult:
    """Return what a row gives whose likely nodes are all accepted, and half of a draft's levels."""
    likely = sum(tree.shape.depth for tree in plan.trees if tree.source == NGRAM)
    return halved(plan)._replace(accepted=likely, emitted=1 + likely) if likely else halved(plan)


def nodes_of(result: StepResult) -> list[tuple[str, int]]:
    return [(tree.source, tree.shape.nodes) for tree in result.plan.rows[0].trees]


def test_each_step_follows_its_own_nodes_while_the_list_holds() -> None:
    controller = GoodputController(4, COSTS)
    for turn in range(HOLD_STEPS - 1):
        chances = (0.9, 0.8, 0.7)[: 1 + turn % 3]
        assert nodes_of(step(controller, view(*chances)))[0] == (NGRAM, len(chances))


def test_a_request_may_bound_its_time_beside_others() -> None:
    controller = GoodputController(4, COSTS, max_time_per_token_s=1.0)
    assert step(controller, view(0.9, 0.8)).plan.rows[0].trees, "planned by length, as without likely nodes"


def test_speculation_goes_on_where_one_step_has_nothing_worth_drafting() -> None:
    controller = GoodputController(4, COSTS)
    seen = [nodes_of(step(controller, view(*((0.9, 0.8) if turn % 2 else (1e-4,))), kept)) for turn in range(400)]
    assert all(any(source == NGRAM for source, _ in own) for own in seen[301::2][:40])


def test_speculation_goes_on_while_rows_come_and_go() -> None:
    """One row writes less a second than six: that says nothing against speculation for six."""
    cheap = LatencyModel(CostTable.line(0.0, 1e-5, 1e-2), draft_free_s=1e-5)
    controller = GoodputController(4, cheap, drafts_with_model=False)
    modes = list[str]()
    for turn in range(600):
        seen = view(0.6, 0.5, names="abcdef"[: 6 if turn % 60 < 20 else 1])
        plan = controller.plan(seen)
        nodes = sum(tree.shape.nodes for row in plan.rows for tree in row.trees)
        took_s = 1e-2 + 1e-5 * (len(seen.rows) + nodes)
        controller.observe(StepResult(tuple(map(halved, plan.rows)), seen, plan, 0, 1e-5, took_s, took_s + 1e-5))
        modes.append(plan.why.mode)
    assert modes.count("not worth it") == modes.count("trial") == 0
    assert modes.count("speculating") > 580


def test_nodes_that_never_pay_are_tried_seldom() -> None:
    dear = LatencyModel(CostTable.line(0.0, 3e-2, 1e-3), draft_free_s=1e-4)
    controller = GoodputController(4, dear, drafts_with_model=False)
    seen = [nodes_of(step(controller, view(0.2, 0.1))) for _ in range(200)]
    assert sum(map(bool, seen)) < 20


@pytest.mark.parametrize("names", ["a", "abc"])
def test_sources_that_bring_little_rest_and_are_tried_again(names: str) -> None:
    controller = GoodputController(4, COSTS)
    for _ in range(REST_STEPS):
        step(controller, view(1e-4, names=names))
    assert NGRAM not in dict(nodes_of(step(controller, view(0.9, 0.8, names=names)))), "it rests"
    woken = [NGRAM in dict(nodes_of(step(controller, view(0.9, 0.8, names=names)))) for _ in range(2 * REST_STEPS)]
    assert not any(woken[: REST_STEPS // 4])
    assert sum(woken[REST_STEPS:]) > REST_STEPS // 2


@pytest.mark.parametrize(("planning_s", "rests"), [(1e-3, False), (2e-2, True)])
def test_sources_must_bring_more_than_planning_with_them_takes(planning_s: float, rests: bool) -> None:
    """They promise a fifth of all tokens. Twenty of 51 milliseconds are more than that, one of 32 is less."""
    controller = GoodputController(4, COSTS, drafts_with_model=False)
    seen = BatchView(tuple([row._replace(others=()) for row in view(0.3, names="abc").rows]))
    drafted = []
    for turn in range(2 * REST_STEPS):
        plan = controller.plan(seen)
        stood = int(turn % 10 < 3)  # they keep what they promise
        rows = tuple([halved(row)._replace(accepted=stood, emitted=1 + stood) for row in plan.rows])
        nodes = sum(tree.shape.nodes for row in plan.rows for tree in row.trees)
        took_s = 3e-2 + 3e-4 * (3 + nodes)
        controller.observe(StepResult(rows, seen, plan, 0, 0.0, took_s, took_s + planning_s, planning_s=planning_s))
        drafted.append(nodes)
    assert (drafted.count(0) > REST_STEPS // 2) is rests


def test_steps_count_without_planning_but_where_each_is_planned_for() -> None:
    steps, seen = LikelySources(), view(0.9, names="abc")
    why = GoodputController(4, COSTS).decide(seen)
    result = StepResult((), seen, Plan(()), 0, 0.0, 0.02, 0.03, planning_s=0.004)
    assert steps.learn(result, why, (2, 2.0)) == pytest.approx(0.03)
    assert steps.learn(result, why, None) == pytest.approx(0.026)
    alone = replace(result, view=BatchView(tuple(map(without_likely, view(0.9).rows))))
    assert steps.learn(alone, why, None) == pytest.approx(0.026), "one that measures plain decoding is planned for"
    assert steps.learn(alone, why, (2, 2.0)) == pytest.approx(0.026), "and most that speculate take a plan as it is"


@pytest.mark.parametrize(("planning_s", "rests"), [(4e-4, False), (2e-2, True)])
def test_planning_of_plain_steps_counts_too(planning_s: float, rests: bool) -> None:
    """Where no speculation pays all steps are plain, and planning them costs as much."""
    steps, seen = LikelySources(), view(0.9, names="abc")
    why = GoodputController(4, COSTS).decide(seen)
    steps.learn(StepResult((), seen, Plan(()), 0, 0.0, 0.02, 0.03, planning_s=planning_s), why, None)
    for _ in range(300):
        steps.decided(replace(why, promised_ratio=1.0, gain=0.1), seen.rows)
    assert (steps.awake(seen) is not seen) is rests


def test_a_plain_plan_holds_while_no_row_has_likely_nodes() -> None:
    dear = LatencyModel(CostTable.line(0.0, 3e-2, 1e-3), CostTable.line(0.0, 1e-2, 1e-2), draft_free_s=1e-4)
    controller, seen = GoodputController(4, dear), view(0.2, 0.1, names="abc")
    quiet = BatchView(tuple(map(without_likely, seen.rows)))
    while step(controller, seen).plan.why.mode != "not worth it":
        pass
    first, second, third = (step(controller, quiet).plan.why for _ in range(3))
    assert first.mode == "not worth it"
    assert second is third
    assert step(controller, seen).plan.why is not third, "planned for the nodes"


@pytest.mark.parametrize(("earned", "other"), [("abc", "a"), ("ab", "abc")])
def test_few_rows_and_many_rest_apart(earned: str, other: str) -> None:
    controller = GoodputController(4, COSTS)
    for _ in range(REST_STEPS):
        step(controller, view(1e-4, names=earned))
    assert NGRAM not in dict(nodes_of(step(controller, view(0.9, 0.8, names=earned))))
    assert any(NGRAM in dict(nodes_of(step(controller, view(0.9, 0.8, names=other)))) for _ in range(HOLD_STEPS))


def test_another_draft_ends_a_rest() -> None:
    controller = GoodputController(4, COSTS)
    for _ in range(REST_STEPS):
        step(controller, view(1e-4, names="abc"))
    controller.draft_changed(DraftChange())
    assert any(NGRAM in dict(nodes_of(step(controller, view(0.9, 0.8, names="abc")))) for _ in range(HOLD_STEPS))


def test_second_best_sources_are_due_once_in_so_many_steps_however_often_it_is_asked() -> None:
    sources = LikelySources()
    asked = [[sources.second_is_due(step) for _ in range(2)] for step in range(3 * SECOND_EVERY)]
    assert all(first == again for first, again in asked)
    assert [step for step, (due, _) in enumerate(asked) if due] == [n * SECOND_EVERY - 1 for n in (1, 2, 3)]


def test_a_decision_is_learnt_from_once_and_by_its_steps_alone() -> None:
    """Asked twice the controller plans alike, and what plans promise is weighed when the step has passed."""
    controller = GoodputController(4, COSTS)
    for turn in range(3 * SECOND_EVERY):
        seen = view(*(0.3, 0.2, 0.1)[: 1 + turn % 3])
        assert controller.plan(seen) == controller.plan(seen) == step(controller, seen).plan


def test_a_list_holds_for_the_same_rows_and_for_so_many_steps() -> None:
    reused, rows = ReusedPlan(), view(0.9).rows
    planner, reading = (
        StepPlanner(rows, 4, AcceptanceEstimate(4), COSTS, prefill_tokens=count).at_best_price() for count in (0, 5)
    )
    reused.keep(planner, rows, 10)
    steps = [step for step in range(30) if reused.planner(view(0.5), step) is planner]
    assert steps == list(range(11, 10 + HOLD_STEPS)), "not for the step that it was made for"
    assert reused.planner(view(0.5, names="b"), 11) is None
    assert reused.planner(replace(view(0.5), prefill_tokens=5), 11) is None
    reused.keep(reading, rows, 10)
    assert reused.planner(view(0.5), 11) is None, "it counts prompt tokens"
    reused.keep(planner, rows, 10)
    reused.drop()
    assert reused.planner(view(0.5), 11) is None
