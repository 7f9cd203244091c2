"""What a draft model reads before it drafts: texts that went on without it."""

from __future__ import annotations

from collections.abc import Sequence as Seq

ALONG = 8  # unread tokens a row may have in the first pass of a draft loop; longer texts are read in a pass before it
MOST = 512  # tokens of long texts read a step, all rows together
IN_STEP = 1  # token a row that a draft in step with it has yet to read


def reading_up(unread: Seq[int]) -> tuple[int, int]:
    """Tokens beyond those of a draft in step, and passes of their own, where rows that draft have `unread` tokens."""
    behind = sum([max(0, tokens - IN_STEP) for tokens in unread])
    return min(behind, MOST), int(any(tokens > ALONG for tokens in unread))
