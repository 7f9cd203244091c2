"""Work of a step that its costs are learnt from, and the seconds of its drafting."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.live_latency import RowWork


def work_of(view: BatchView, plan: Plan, rows: Sequence[RowResult], *, trees: bool) -> list[RowWork]:
    """Return what each row did, for the costs that are learnt from it.

    Args:
        trees: drafts' trees may have siblings. Behind the nodes of another source, a row's last tree is the draft's.
    """
    by_level = trees or any(len(planned.trees) > 1 for planned in plan.rows)
    return [_work(*each, by_level=by_level) for each in zip(view.rows, plan.rows, rows, strict=True)]


def _work(row: RowView, plan: RowPlan, result: RowResult, *, by_level: bool) -> RowWork:
    drafts = row.drafted_by_model and any(tree.source == row.source for tree in plan.trees)
    reads: tuple[int, ...] | None = None
    if by_level:
        reads = plan.trees[-1].shape.reads[: result.depth] if plan.trees else ()
    unread = row.unread_tokens if drafts else None
    return RowWork(row.context_tokens, result.nodes, unread, row.source, row.drafts_block, reads)


def catch_up_s(latency: LatencyModel, rows: Sequence[RowView], lengths: Sequence[int]) -> float:
    """Return the seconds of catch-up prefill of the rows that draft models draft for."""
    unread: dict[str, list[int]] = {}
    for row in [row for row, k in zip(rows, lengths, strict=True) if k and row.drafted_by_model]:
        unread.setdefault(row.source, []).append(row.unread_tokens)
    return sum([latency.of_draft(source).catch_up_s(tokens) for source, tokens in unread.items()])


def drafting_s(view: BatchView, result: StepResult) -> dict[str, float]:
    """Return the seconds of each draft's passes. Those of other sources are left out where they are known."""
    drafts = dict.fromkeys([row.source for row in view.rows if row.drafted_by_model])
    if result.drafted_s:
        return {source: result.drafted_s[source] for source in drafts if source in result.drafted_s}
    return {next(iter(drafts), DRAFT): result.draft_s}
