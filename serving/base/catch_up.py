"""Catch-up prefill: tokens that a draft model reads before it drafts, where texts went on without it."""

from __future__ import annotations

from collections.abc import Sequence

READ_WITH_DRAFTING = 8  # unread tokens a row may have in the first pass of a draft loop. More are read in a pass before
CATCH_UP_TOKENS_A_STEP = 512  # of long texts, over all rows
IN_STEP = 1  # unread tokens of a row whose draft has kept up


def catch_up_cost(unread_tokens: Sequence[int]) -> tuple[int, int]:
    """Return what catch-up prefill adds to a step: tokens, and passes of their own (0 or 1).

    Args:
        unread_tokens: tokens that the draft has not read, of each row that drafts.
    """
    behind = sum([max(0, tokens - IN_STEP) for tokens in unread_tokens])
    needs_pass = any(tokens > READ_WITH_DRAFTING for tokens in unread_tokens)
    return min(behind, CATCH_UP_TOKENS_A_STEP), int(needs_pass)
