"""Decision of a goodput controller: the lengths of a step, and the reasons for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.control.base import BatchView, Plan, RowPlan, RowView
from distillspec.serving.costs.latency import LatencyModel

Speculating = Literal["speculating", "exploring", "trial", "within bounds", "bounds out of reach"]
Mode = Literal[Speculating, "not worth it", "measuring plain", "nothing to draft for"]


@dataclass(frozen=True)
class Decision:
    """Reasons of a plan: predicted seconds and tokens of the step, and the estimates behind them."""

    mode: Mode
    lengths: tuple[int, ...]  # levels of each row
    shapes: tuple[TreeShape, ...]  # of each row's tree
    rows: tuple[RowView, ...] = field(repr=False)  # that it was decided for, each with its source
    predicted_tokens: float
    predicted_s: float
    plain_tokens_per_s: float
    best_tokens_per_s: float  # of the best lengths, whether they were taken or not
    uncertainty: float  # relative, of the measured goodput
    hazards: tuple[float, ...]
    latency: LatencyModel
    raw: tuple[float, float]  # goodput without speculation and of the best lengths, before what was measured
    slo_violation: float | None = None  # the worst row's expected time per token over its bound, None without bounds

    def holds_for(self, rows: Sequence[RowView], most: int) -> bool:
        """Return True for rows that are planned for as these were: their texts alone have grown.

        A draft that reads long texts first does so in a single step.

        Args:
            most: tokens that a row may draft. Its limit falls with every step, and counts once it is below `most`.
        """
        if not any(self.lengths) and not any(row.max_time_per_token_s for row in rows):
            return [row.sequence_id for row in rows] == [row.sequence_id for row in self.rows]
        own = zip(self.rows, self.lengths, strict=True)
        if any(length and row.drafted_by_model and row.unread_tokens > ALONG for row, length in own):
            return False
        return len(rows) == len(self.rows) and all(_is_alike(*pair, most) for pair in zip(rows, self.rows, strict=True))


def _is_alike(row: RowView, before: RowView, most: int) -> bool:
    if row.others or row.match or row.likely or row.max_time_per_token_s is not None:
        return False
    grown = before._replace(
        context_tokens=row.context_tokens, unread_tokens=row.unread_tokens, limit=row.limit, left=row.left
    )
    return row == grown and min(row.limit, most) == min(before.limit, most)


def unread_tokens(view: BatchView, plan: Plan) -> list[int | None]:
    """Return the tokens that each row's draft had not read before the step, None where no draft was to draft."""
    return [
        row.unread_tokens if row.drafted_by_model and any(tree.source == row.source for tree in own.trees) else None
        for row, own in zip(view.rows, plan.rows, strict=True)
    ]


def catch_up_s(latency: LatencyModel, rows: Sequence[RowView], lengths: Sequence[int]) -> float:
    """Return the seconds of catch-up prefill of the rows that draft models draft for."""
    unread: dict[str, list[int]] = {}
    for row in [row for row, k in zip(rows, lengths, strict=True) if k and row.drafted_by_model]:
        unread.setdefault(row.source, []).append(row.unread_tokens)
    return sum([latency.of_draft(False, source).catch_up_s(own) for source, own in unread.items()])


def draft_reads(plans: Sequence[RowPlan], rows: Sequence[RowResult], *, trees: bool) -> list[tuple[int, ...]] | None:
    """Return the tokens of each row that each pass of its draft read. None: those of a chain of all its tokens.

    Args:
        trees: drafts' trees may have siblings. Behind the nodes of another source, a row's last tree is the draft's.
    """
    if len(plans) != len(rows) or not (trees or any(len(plan.trees) > 1 for plan in plans)):
        return None
    pairs = zip(plans, rows, strict=True)
    return [plan.trees[-1].shape.reads[: row.depth] if plan.trees else () for plan, row in pairs]
