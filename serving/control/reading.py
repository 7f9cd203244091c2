"""Reading of texts that drafts are far behind in. It must pay in the steps that a row has left."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.base.rows import RowView
from distillspec.serving.control.allocation import Allocation
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


def readable(rows: Sequence[RowView], lengths: Sequence[int]) -> list[int]:
    """Return 1 for each row that drafts, or could draft without a long text being read for it, else 0."""
    pairs = zip(rows, lengths, strict=True)
    return [int(length > 0 or not row.drafted_by_model or row.unread_tokens <= ALONG) for row, length in pairs]


def best_worth_reading(
    rows: Sequence[RowView],
    best: Allocation,
    best_of: Callable[[tuple[RowView, ...]], Allocation],
    latency: LatencyModel,
) -> Allocation:
    """Return the best lengths of which no text is read in vain.

    A row's reading must take less time than its share of what all rows that are far behind save by drafting.

    Args:
        best: the best lengths, whatever is read for them.
        best_of: returns those of other rows.
    """
    if not (behind := far_behind(rows, best.lengths.tolist())):
        return best
    other = best_of(without(rows, behind))
    saved_s = (best.tokens / other.goodput - best.seconds) / len(behind)
    written = best.tokens / len(rows)
    vain = [
        row
        for row in behind
        if saved_s * steps_to_pay(row.left, written) < latency.reading_s(row.unread_tokens, row.source)
    ]
    if len(vain) == len(behind):
        return other
    return best_of(without(rows, vain)) if vain else best
