"""Row of a pass: the tokens that it reads into one slot, and whose hidden states are wanted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.serving.base.tree import TokenTree


@dataclass(frozen=True)
class RowInput:
    """Tokens to read into one slot after its first `start`, and for how many of the last ones logits are wanted.

    With a `tree`, `tokens` are one committed token (the root) and then the tree's nodes. Not `rooted`: the nodes alone,
    which continue the text before `start`. The last `mutual` tokens see each other in both directions.
    """

    slot: int
    start: int
    tokens: Sequence[int]
    wanted: int = 1
    tree: TokenTree | None = None
    rooted: bool = True
    mutual: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def is_wide(self) -> bool:
        """True if the tokens are no chain."""
        return self.tree is not None and not self.tree.is_chain

    @property
    def parents(self) -> tuple[int, ...]:
        """The parent of each token where they are no chain, an earlier one or −1. Else empty."""
        if self.tree is None or self.tree.is_chain:
            return ()
        return (-1, *[1 + parent for parent in self.tree.parents]) if self.rooted else self.tree.parents

    @property
    def depths(self) -> list[int]:
        """Positions of a tree's tokens, counted from `start`."""
        if self.tree is None:
            return list(range(len(self.tokens)))
        return [0, *self.tree.depths] if self.rooted else [depth - 1 for depth in self.tree.depths]
