"""Catch-up prefill: tokens that a draft model reads before it drafts, where texts went on without it."""

from __future__ import annotations

from collections.abc import Sequence

ALONG = 8  # unread tokens a row may have in the first pass of a draft loop. Longer texts are read in a pass before it
MOST = 512  # tokens of long texts that are read a step, over all rows
IN_STEP = 1  # unread tokens of a row whose draft has kept up


def catch_up_cost(unread_tokens: Sequence[int]) -> tuple[int, int]:
    """Return what catch-up prefill adds to a step: tokens, and passes of their own (0 or 1).

    Args:
        unread_tokens: tokens that the draft has not read, of each row that drafts.
    """
    behind = sum([max(0, tokens - IN_STEP) for tokens in unread_tokens])
    return min(behind, MOST), int(any(tokens > ALONG for tokens in unread_tokens))
