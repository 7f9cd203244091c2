"""Nodes that a source may draft for a row, with their chances: a source that grows its own trees knows them."""

from __future__ import annotations

from typing import NamedTuple

from distillspec.serving.base.shape import TreeShape

FEW_ROWS = 2  # gains and costs of sources are learnt apart for batches of at most so many rows


class LikelyNodes(NamedTuple):
    """Nodes in the order in which they are worth drafting. The first few of them are a tree, however many.

    chances: P(the node is on the accepted path), never rising.
    parents: the place of each node's parent, −1 for the text. Parents and elder siblings come first.
    depths: of each node, 1 for those behind the text.
    source: that drafts them.
    """

    source: str
    chances: tuple[float, ...] = ()
    parents: tuple[int, ...] = ()
    depths: tuple[int, ...] = ()

    @property
    def tokens(self) -> float:
        """Expected accepted tokens."""
        return sum(self.chances)

    @property
    def missed(self) -> float:
        """P(none of the text's own children is accepted)."""
        children = [chance for chance, depth in zip(self.chances, self.depths, strict=True) if depth == 1]
        return max(0.0, 1.0 - sum(children))

    def first(self, count: int) -> LikelyNodes:
        """Return the first `count` nodes."""
        return LikelyNodes(self.source, self.chances[:count], self.parents[:count], self.depths[:count])

    def within(self, levels: int) -> LikelyNodes:
        """Return the nodes of the first `levels` levels."""
        if levels >= max(self.depths, default=0):
            return self
        kept = [node for node, depth in enumerate(self.depths) if depth <= levels]
        place = {-1: -1, **{node: new for new, node in enumerate(kept)}}
        return LikelyNodes(
            self.source,
            tuple([self.chances[node] for node in kept]),
            tuple([place[self.parents[node]] for node in kept]),
            tuple([self.depths[node] for node in kept]),
        )

    @property
    def shape(self) -> TreeShape:
        """The tree of all nodes."""
        return TreeShape.of_parents(self.parents)
