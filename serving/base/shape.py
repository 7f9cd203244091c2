"""Shapes of drafted trees, as plans ask for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

from distillspec.serving.base.tree import DRAFT


@dataclass(frozen=True)
class TreeShape:
    """A tree of ranks: `levels[d][i]` children under node i of level d. Level 0 is the text, one node.

    A level's nodes stand in the order of their parents, and siblings in the order in which they are tried.

    Raises ValueError if a level has no children, or does not name them for each node above.
    """

    levels: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        above = 1
        for level in self.levels:
            if len(level) != above or min(level) < 0 or not any(level):
                raise ValueError(f"children {level} under {above} nodes")
            above = sum(level)

    @classmethod
    def full(cls, widths: Sequence[int]) -> TreeShape:
        """Return the tree with `widths[i]` children under every node of level i. (1, 1, 1) is a chain of 3 tokens."""
        levels: list[tuple[int, ...]] = []
        for width in widths:
            levels.append((width,) * (sum(levels[-1]) if levels else 1))
        return cls(tuple(levels))

    @classmethod
    def spine(cls, widths: Sequence[int]) -> TreeShape:
        """Return a chain whose level i has `widths[i]` siblings, the chain's own token first. Others have no children.

        They cost a draft no further pass.
        """
        above = [1, *widths[:-1]]
        return cls(tuple([(width, *[0] * (nodes - 1)) for width, nodes in zip(widths, above, strict=False)]))

    @classmethod
    def of_parents(cls, parents: Sequence[int]) -> TreeShape:
        """Return the tree in which node i is a child of node `parents[i]`, −1 for the text. Parents come first."""
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(parents):
            children.setdefault(parent, []).append(node)
        levels, above = [], [-1]
        while below := [child for node in above for child in children.get(node, ())]:
            levels.append(tuple([len(children.get(node, ())) for node in above]))
            above = below
        return cls(tuple(levels))

    @property
    def depth(self) -> int:
        """Levels: the most tokens that could be accepted."""
        return len(self.levels)

    @cached_property
    def nodes(self) -> int:
        """Drafted tokens. The full tree of widths (3, 2, 2) has 3 + 6 + 12 = 21."""
        return sum(map(sum, self.levels))

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """The most children of a node, by level."""
        return tuple(map(max, self.levels))

    @cached_property
    def is_spine(self) -> bool:
        """True if only the first node of each level has children: `spine(widths)` is this tree."""
        return not any(any(level[1:]) for level in self.levels)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Nodes with children, by level: those that a draft reads to draft the level below. 1 for the text."""
        return tuple([sum(own > 0 for own in level) for level in self.levels])

    def shortened(self, depth: int) -> TreeShape:
        """Return the tree without levels deeper than `depth`."""
        return self if depth >= self.depth else TreeShape(self.levels[:depth])


NO_TREE = TreeShape()


class PlannedTree(NamedTuple):
    """A tree to be drafted by one source."""

    source: str
    shape: TreeShape


@cache
def chain_shape(speculation_length: int) -> TreeShape:
    """Return a chain."""
    return TreeShape.full((1,) * speculation_length)


def chain_of(speculation_length: int, source: str = DRAFT) -> tuple[PlannedTree, ...]:
    """Return the plan of one chain, empty for length 0."""
    return (PlannedTree(source, chain_shape(speculation_length)),) if speculation_length else ()
