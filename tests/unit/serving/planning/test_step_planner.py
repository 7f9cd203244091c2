"""A planner at its price: what pays of each source for a row, alone and together."""

from __future__ import annotations

import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.candidates import candidates
from distillspec.serving.base.catch_up import CATCH_UP_TOKENS_A_STEP, READ_WITH_DRAFTING
from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.plans import RowPlan
from distillspec.serving.base.rows import Option, RowView, evidence
from distillspec.serving.base.tree import DRAFT, NGRAM
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.step_planner import StepPlanner

# A plain step takes 30 ms, a node 0.3 ms more, a pass of the draft 3 ms.
COSTS = LatencyModel(CostTable.line(0.0, 3e-4, 3e-2), CostTable.line(0.0, 1e-4, 3e-3), draft_free_s=1e-4)
SURE = LikelyNodes(NGRAM, (0.9, 0.8, 0.7, 0.6), (-1, 0, 1, 2), (1, 2, 3, 4))
UNSURE = LikelyNodes(NGRAM, (0.3, 0.1, 0.005), (-1, -1, 0), (1, 1, 2))
BELOW = LikelyNodes(NGRAM, (0.004,), (-1,), (1,))


def row(nodes: LikelyNodes | None, name: str = "a", *, draft: bool = True, limit: int = 4) -> RowView:
    named = Option(limit, drafted_by_model=False, source=NGRAM, likely=nodes)
    model = Option(limit, wide=True)
    options = [option for option, there in ((named, nodes is not None), (model, draft)) if there]
    return RowView(name, 100, limit, others=tuple(options[1:]))._replace(**options[0]._asdict())


def learnt(alone: float, behind: float) -> AcceptanceEstimate:
    """An estimate that has seen so much of a draft's tokens accepted, alone and behind others."""
    estimate = AcceptanceEstimate(4, width=2)
    both = [evidence(Option(4)), evidence(Option(4, likely=UNSURE))]
    for turn in range(300):
        rows = [RowResult.chain("x", 4, 4 * ((turn * share) % 1 < share), 5) for share in (alone, behind)]
        estimate.observe(rows, both)
    return estimate


def planned(view: RowView, alone: float = 0.5, behind: float = 0.4, costs: LatencyModel = COSTS) -> RowPlan:
    (chosen,) = StepPlanner([view], 4, learnt(alone, behind), costs).at_best_price().plan([view]).chosen
    return RowPlan.of(chosen.row, chosen.shape)


def sources(plan: RowPlan) -> list[tuple[str, int]]:
    return [(tree.source, tree.shape.nodes) for tree in plan.trees]


def test_sure_nodes_need_no_draft() -> None:
    assert sources(planned(row(SURE))) == [(NGRAM, 4)]


def test_a_draft_is_tried_behind_nodes_that_pay() -> None:
    """0.3 and 0.1 pay for 0.3 ms, 0.005 does not."""
    (named, draft) = planned(row(UNSURE), alone=0.5, behind=0.6).trees
    assert (named.source, named.shape.nodes) == (NGRAM, 2)
    assert draft.source == DRAFT
    assert draft.shape.depth >= 1


def test_a_draft_that_fails_behind_others_drafts_alone_or_not_at_all() -> None:
    assert {source for source, _ in sources(planned(row(UNSURE), alone=0.8, behind=0.0))} == {DRAFT}
    assert sources(planned(row(UNSURE), alone=0.0, behind=0.0)) == [(NGRAM, 2)]


def test_nodes_that_do_not_pay_are_left_out() -> None:
    assert {source for source, _ in sources(planned(row(BELOW)))} == {DRAFT}
    assert sources(planned(row(BELOW, draft=False))) == []
    assert sources(planned(row(None), alone=0.0)) == []


def test_likely_nodes_are_worth_as_much_where_a_draft_is_too_dear_as_where_there_is_none() -> None:
    """Of eight rows two could draft: each takes a pass for an eighth of what it costs."""
    dear = LatencyModel(CostTable.line(0.0, 1e-4, 1e-2), CostTable.line(0.0, 1e-5, 4e-3), draft_free_s=1e-5)
    found = []
    for drafting in ("ab", ""):
        rows = [row(UNSURE, name, draft=name in drafting) for name in "abcdefgh"]
        found.append(StepPlanner(rows, 4, learnt(0.6, 0.6), dear).at_best_price().plan(rows))
    assert [sum(each.drafts for each in plan.chosen) for plan in found] == [0, 0]
    assert found[0].gain == pytest.approx(found[1].gain, rel=0.05)


@pytest.mark.parametrize(("drafting", "drafts"), [(1, False), (8, True)])
def test_a_pass_of_a_draft_must_pay_for_the_rows_that_it_drafts_for(drafting: int, drafts: bool) -> None:
    """Of eight rows, at 10 ms a step. A pass takes 4 ms: for one row that is more than its tokens are worth."""
    dear = LatencyModel(CostTable.line(0.0, 1e-4, 1e-2), CostTable.line(0.0, 1e-5, 4e-3), draft_free_s=1e-5)
    names = "abcdefgh"
    rows = [row(None, name, limit=4 if name in names[:drafting] else 0) for name in names]
    planner = StepPlanner(rows, 4, learnt(0.6, 0.6), dear).at_best_price()
    plan = planner.plan(rows)
    assert any(each.shape.depth for each in plan.chosen) is drafts
    assert plan.goodput >= planner.plain(rows).goodput


def test_nodes_stop_where_the_table_jumps() -> None:
    jump = LatencyModel(CostTable.rising([(1, 3e-2), (3, 3.01e-2), (4, 6e-2), (9, 7e-2)]))
    assert sources(planned(row(SURE, draft=False), costs=jump)) == [(NGRAM, 2)]


def test_a_rows_limit_holds_for_the_draft() -> None:
    assert all(tree.shape.depth <= 1 for tree in planned(row(None, limit=1), alone=0.9).trees)


def test_the_expected_tokens_and_seconds_are_those_of_the_plan() -> None:
    rows = [row(SURE, "a"), row(UNSURE, "b"), row(None, "c")]
    planner = StepPlanner(rows, 4, learnt(0.6, 0.5), COSTS, trees=candidates((2, 1, 1, 1), 8)).at_best_price()
    found = planner.plan(rows)
    nodes = sum(tree.shape.nodes for each in found.chosen for tree in RowPlan.of(each.row, each.shape).trees)
    assert found.nodes == nodes
    assert found.expected.tokens == pytest.approx(3 + sum(each.tokens for each in found.chosen))
    drafted = [(each.row.context_tokens, each.shape.reads) for each in found.chosen if each.drafts]
    drafting_s = COSTS.trees_s(drafted) + COSTS.draft_free_s  # of the model, and of the nodes that n-grams name
    assert found.expected.seconds == pytest.approx(COSTS.target.seconds(300, 3 + nodes, 3) + drafting_s)
    assert planner.plain(rows).goodput < found.goodput
    assert planner.price == pytest.approx(found.goodput, rel=0.03)


def test_the_second_best_is_taken_where_it_is_asked_for() -> None:
    view = row(SURE)
    planner = StepPlanner([view], 4, learnt(0.6, 0.5), COSTS).at_best_price()
    (best,), (second,) = planner.plan([view]).chosen, planner.plan([view], second=True).chosen
    assert not best.row.drafted_by_model
    assert second.row.drafted_by_model


@pytest.mark.parametrize(("alone", "reads"), [(0.9, True), (0.1, False)])
def test_a_draft_reads_a_long_text_where_that_pays(alone: float, reads: bool) -> None:
    """Reading 400 tokens takes 43 ms: a draft that is right with 0.1 does not save that in 24 steps."""
    read, unread = row(None), row(None)._replace(unread_tokens=400)
    assert sources(planned(read, alone=alone))
    assert bool(sources(planned(unread, alone=alone))) == reads


def test_no_long_text_is_read_to_explore_its_draft() -> None:
    def second(unread: int) -> RowPlan:
        draft = Option(4, wide=True, unread_tokens=unread)
        view = row(SURE)._replace(others=(draft,))
        (chosen,) = StepPlanner([view], 4, learnt(0.5, 0.1), COSTS).at_best_price().plan([view], second=True).chosen
        return RowPlan.of(chosen.row, chosen.shape)

    assert DRAFT in dict(sources(second(READ_WITH_DRAFTING)))
    assert DRAFT in dict(sources(second(100))), "13 ms are less than half of a plain step"
    assert sources(second(400)) == [(NGRAM, 4)]


def test_of_several_texts_the_shortest_is_read_to_explore_its_draft() -> None:
    lengths = {"a": 90, "b": 60, "c": 90}
    rows = [row(SURE, name)._replace(others=(Option(4, unread_tokens=unread),)) for name, unread in lengths.items()]
    chosen = StepPlanner(rows, 4, learnt(0.5, 0.1), COSTS).at_best_price().plan(rows, second=True).chosen
    assert [each.row.drafted_by_model for each in chosen] == [False, True, False]


def test_reading_is_charged_for_all_steps_that_it_takes() -> None:
    def reads(unread: int) -> bool:
        return bool(sources(planned(row(None)._replace(unread_tokens=unread), alone=0.5)))

    assert reads(CATCH_UP_TOKENS_A_STEP)
    assert not reads(40 * CATCH_UP_TOKENS_A_STEP)


def test_the_gain_of_likely_nodes_is_over_the_best_without_them() -> None:
    def gain(*views: RowView, alone: float = 0.5) -> float:
        return StepPlanner(views, 4, learnt(alone, 0.1), COSTS).at_best_price().plan(views).gain

    assert gain(row(None)) == gain(row(BELOW)) == 0
    assert gain(row(SURE, draft=False)) > gain(row(SURE)) > gain(row(SURE), row(None, "b")) > 0
    assert gain() == 0, "no row decodes"


def test_a_row_has_no_more_nodes_than_the_engine_reserves_places_for() -> None:
    """A tree's, or those of a chain behind the likely nodes."""
    free = LatencyModel(CostTable.line(0.0, 1e-9, 3e-2), CostTable.line(0.0, 1e-9, 1e-9), draft_free_s=0.0)
    trees = candidates((2, 2, 2, 2), 8)
    for nodes in (SURE.first(1), SURE):  # the tree behind one node is not taken behind four
        rows = [row(nodes)]
        planner = StepPlanner(rows, 4, learnt(0.9, 0.9), free, trees=trees).at_best_price()
        for seen in ([row(SURE.first(1))], [row(SURE)]):
            (chosen,) = planner.plan(seen).chosen
            counts = dict(sources(RowPlan.of(chosen.row, chosen.shape)))
            assert counts.get(DRAFT, 0) <= max(4, 8 - counts.get(NGRAM, 0))


def test_a_draft_that_cannot_draft_siblings_gets_chains() -> None:
    view = row(None)._replace(wide=False)
    planner = StepPlanner([view], 4, learnt(0.5, 0.5), COSTS, trees=candidates((3, 2, 1, 1), 12)).at_best_price()
    (chosen,) = planner.plan([view]).chosen
    assert chosen.shape.depth > 0
    assert max(chosen.shape.widths) == 1


def test_a_list_plans_for_later_rows_by_what_they_are() -> None:
    """Likely nodes change with every step, and one step may be planned for twice."""
    rows, later = [row(SURE)], [row(UNSURE)._replace(context_tokens=300)]
    planner = StepPlanner(rows, 4, learnt(0.0, 0.0), COSTS).at_best_price()
    for _ in range(2):
        (chosen,) = planner.plan(later).chosen
        assert sources(RowPlan.of(chosen.row, chosen.shape)) == [(NGRAM, 2)]
        assert [each.row.context_tokens for each in planner.plain(later).chosen] == [300]
    (first,) = planner.plan(rows).chosen
    assert sources(RowPlan.of(first.row, first.shape)) == [(NGRAM, 4)]
