"""Reading of texts that drafts are far behind in. It must pay in the steps that a row has left."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.control.allocation import Allocation
from distillspec.serving.control.base import RowView
from distillspec.serving.costs.latency import LatencyModel

PAYS_BACK = 24  # steps in which the reading of a text by a draft must pay


def steps_to_pay(left: int, tokens: float) -> float:
    """Return the steps in which reading must pay.

    Args:
        left: the most tokens that the row may still write.
        tokens: that it writes a step.
    """
    return min(PAYS_BACK, left / tokens)


def far_behind(rows: Sequence[RowView], lengths: Sequence[int]) -> list[RowView]:
    """Return the rows that draft, and whose draft must read a long text before."""
    pairs = zip(rows, lengths, strict=True)
    return [row for row, length in pairs if length and row.drafted_by_model and row.unread_tokens > ALONG]


def without(rows: Sequence[RowView], behind: Sequence[RowView]) -> tuple[RowView, ...]:
    """Return the rows, of which those that are far behind draft nothing."""
    names = {row.sequence_id for row in behind}
    return tuple([row.within(0) if row.sequence_id in names else row for row in rows])


def reading_pays(behind: Sequence[RowView], latency: LatencyModel, best: Allocation, other: Allocation) -> bool:
    """Return True if reading takes less time than the lengths `best` save over `other`, for which nothing is read."""
    unread: dict[str, int] = {}
    for row in behind:
        unread[row.source] = unread.get(row.source, 0) + row.unread_tokens
    reading_s = sum([latency.reading_s(tokens, source) for source, tokens in unread.items()])
    saved_s = best.tokens / other.goodput - best.seconds
    left = min([row.left for row in behind])
    return saved_s * steps_to_pay(left, best.tokens / len(best.lengths)) >= reading_s
