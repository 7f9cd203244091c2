"""Acceptance of a draft that has collapsed: next to nothing is accepted of one that was once accepted."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.tree import ROOT, TokenTree

BLOCK = 200  # first tokens that are tried between two judgements
LEAST, USUAL = 0.02, 0.2  # acceptance below the one has collapsed, where it was the other once


class DraftCollapse:
    """Counts the first drafted tokens of rows that were tried, in blocks of `BLOCK`.

    Args:
        usual: acceptance rate of the draft by its own evaluation, None: not known. The best block so far, if higher.
    """

    def __init__(self, usual: float | None) -> None:
        self.usual = usual or 0.0
        self.tried = self.accepted = 0

    @property
    def rate(self) -> float:
        """Share of the tried tokens of this block that were accepted, 0 before any."""
        return self.accepted / max(1, self.tried)

    def saw(self, source: str, tree: TokenTree, path: Sequence[int]) -> None:
        """Count a verified tree, where a first token of the draft was tried."""
        if self.tried == BLOCK:
            self.usual = max(self.usual, self.rate)
            self.tried = self.accepted = 0
        for group in tree.groups_at(ROOT):
            is_accepted = bool(path) and path[0] in group.nodes
            if group.source == source:
                self.tried, self.accepted = self.tried + 1, self.accepted + is_accepted
            if group.source == source or is_accepted:
                return

    @property
    def is_judged(self) -> bool:
        """True once the block is whole."""
        return self.tried == BLOCK

    @property
    def has_collapsed(self) -> bool:
        """True for a whole block of a draft that was good once, and is accepted no more."""
        return self.is_judged and self.rate < LEAST and self.usual >= USUAL
