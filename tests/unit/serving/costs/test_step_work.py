"""What is learnt from steps: the work of each row, with the levels that its draft has read."""

from __future__ import annotations

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan, RowPlan
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.shape import PlannedTree, TreeShape, chain_of
from distillspec.serving.base.tree import NGRAM
from distillspec.serving.costs.live_latency import RowWork
from distillspec.serving.costs.step_work import work_of

WIDE = TreeShape.full((2, 1))  # two tokens, one behind each


def test_rows_of_chains_have_no_levels_of_their_own() -> None:
    rows = (RowView("a", 50, 4, unread_tokens=3), RowView("b", 60, 4, False, source=NGRAM), RowView("c", 70, 4))
    plans = (RowPlan("a", chain_of(3, "draft")), RowPlan("b", chain_of(2, NGRAM)), RowPlan("c"))
    results = [RowResult.chain("a", 3, 1, 2), RowResult.chain("b", 2, 0, 1), RowResult.chain("c", 0, 0, 1)]
    found = work_of(BatchView(rows), Plan(plans), results, trees=False)
    assert found == [RowWork(50, 3, 3), RowWork(60, 2, source=NGRAM), RowWork(70, 0)]
    assert [work.levels for work in found] == [3, 2, 0]


def test_a_draft_reads_its_tree_level_by_level() -> None:
    """Behind likely nodes the last tree is the draft's. A draft that was to draft and did not has read on."""
    rows = (RowView("a", 50, 4, unread_tokens=1), RowView("b", 60, 4, unread_tokens=900, drafts_block=True))
    plans = (
        RowPlan("a", (PlannedTree(NGRAM, TreeShape.full((1,))), PlannedTree("draft", WIDE))),
        RowPlan("b", (PlannedTree("draft", WIDE),)),
    )
    drafted, behind = RowResult("a", 2, 5, 1, 2), RowResult("b", 0, 0, 0, 1)
    found = work_of(BatchView(rows), Plan(plans), [drafted, behind], trees=True)
    assert found == [RowWork(50, 5, 1, reads=WIDE.reads[:2]), RowWork(60, 0, 900, drafts_block=True, reads=())]
    assert [work.levels for work in found] == [2, 0]
