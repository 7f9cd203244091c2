"""Acceptance of a draft that has collapsed: next to nothing is accepted of one that was once accepted."""

from __future__ import annotations

from collections import deque

JUDGED_TOKENS = 200  # first tokens that were tried last, and that a draft is judged by
COLLAPSED_ACCEPTANCE, GOOD_ACCEPTANCE = 0.02, 0.2  # acceptance below the one has collapsed, where it was the other once


class DraftCollapse:
    """Judges a draft by its last `JUDGED_TOKENS` first tokens that were tried.

    Args:
        usual: acceptance rate of the draft by its own evaluation, None: not known. The best so far, if higher.
    """

    def __init__(self, usual: float | None) -> None:
        self.usual = usual or 0.0
        self.accepted = 0  # of the last tokens
        self._last = deque[bool]()

    @property
    def rate(self) -> float:
        """Share of the last tokens that were accepted, 0 before any."""
        return self.accepted / max(1, len(self._last))

    def saw(self, is_accepted: bool) -> bool | None:
        """Count a first token that was tried. Return True for a draft that has collapsed, None before it is judged.

        That is one that was good once, and is accepted no more.
        """
        last = self._last
        last.append(is_accepted)
        self.accepted += is_accepted
        if len(last) < JUDGED_TOKENS:
            return None
        if len(last) > JUDGED_TOKENS:
            self.accepted -= last.popleft()
        if self.accepted >= COLLAPSED_ACCEPTANCE * JUDGED_TOKENS:
            self.usual = max(self.usual, self.accepted / JUDGED_TOKENS)
            return False
        return self.usual >= GOOD_ACCEPTANCE

    def begin_anew(self) -> None:
        """Forget the tokens, not what was usual."""
        self._last.clear()
        self.accepted = 0
