"""Reading of texts that drafts are far behind in. It must pay in the steps that a row has left."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.catch_up import ALONG
from distillspec.serving.base.rows import RowView

PAYS_BACK = 24  # steps in which the reading of a text by a draft must pay


def steps_to_pay(left: int, tokens: float) -> float:
    """Return the steps in which reading must pay.

    Args:
        left: the most tokens that the row may still write.
        tokens: that it writes a step.
    """
    return min(PAYS_BACK, left / tokens)


def readable(rows: Sequence[RowView], lengths: Sequence[int]) -> list[int]:
    """Return 1 for each row that drafts, or could draft without a long text being read for it, else 0."""
    pairs = zip(rows, lengths, strict=True)
    return [int(length > 0 or not row.drafted_by_model or row.unread_tokens <= ALONG) for row, length in pairs]
