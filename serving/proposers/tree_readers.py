"""The tokens that a draft reads while it grows trees of planned shapes, numbered for a call that grows them all."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy

from distillspec.models.ancestors import signed_word
from distillspec.models.draft_steps import Readers
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import ROOT


class Reader(NamedTuple):
    """A node with children in a shape whose nodes are numbered level by level."""

    node: int  # −1: the text
    above: int  # number of the reader before it, −1 for none
    first: int  # its first child
    children: int
    seen: int  # bit i: reader i + 1 is the node itself or an ancestor


@lru_cache(maxsize=1024)
def tree_readers(shape: TreeShape) -> tuple[tuple[Reader, ...], ...]:
    """Return the readers of each level. Their numbers count on from level to level."""
    levels: list[tuple[Reader, ...]] = []
    above: list[tuple[int, int, int]] = [(ROOT, -1, 0)]  # nodes of the level, with their reader above and what it sees
    readers = nodes = 0
    for level in shape.levels:
        readers_here, below = list[Reader](), list[tuple[int, int, int]]()
        for (node, reader, seen), children in zip(above, level, strict=True):
            if not children:
                continue
            sees = seen if node == ROOT else seen | 1 << (readers - 1)
            readers_here.append(Reader(node, reader, nodes, children, sees))
            below += [(nodes + child, readers, sees) for child in range(children)]
            readers, nodes = readers + 1, nodes + children
        levels.append(tuple(readers_here))
        above = below
    return tuple(levels)


class CallPlan(NamedTuple):
    """Trees of R rows for one call.

    Attributes:
        readers: for the call.
        starts: place of each row's first chosen token.
        places: places of each row's readers among all, by number.
        draws: the most readers of a row, and the most siblings: draws for a row.
        level: the most readers of a level.
    """

    readers: Readers
    starts: tuple[int, ...]
    places: tuple[tuple[int, ...], ...]
    draws: tuple[int, int]
    level: int

    @property
    def depth(self) -> int:
        """Levels of the deepest tree."""
        return len(self.readers.levels) - 1


@lru_cache(maxsize=64)
def call_plan(shapes: tuple[TreeShape, ...]) -> CallPlan:
    """Return the plan of the trees of some rows, which may end at unlike levels."""
    trees = [tree_readers(shape) for shape in shapes]
    starts = [0, *numpy.cumsum([shape.nodes for shape in shapes]).tolist()]
    places: list[list[int]] = [[] for _ in shapes]
    numbers: list[tuple[int, ...]] = []
    levels = [0]
    for level in range(max(map(len, trees))):
        for row, tree in enumerate(trees):
            start = starts[row]
            for reader in tree[level] if level < len(tree) else ():
                node, above = (-1, -1) if reader.node == ROOT else (start + reader.node, places[row][reader.above])
                number, seen = len(places[row]), signed_word(reader.seen)
                places[row].append(len(numbers))
                numbers.append((row, node, above, start + reader.first, reader.children, number, seen))
        levels.append(len(numbers))
    readers = Readers(numpy.array(levels, dtype=numpy.int64), numpy.array(numbers, dtype=numpy.int64), starts[-1])
    draws = max(map(len, places)), max(max(shape.widths) for shape in shapes)
    return CallPlan(
        readers, tuple(starts[:-1]), tuple(map(tuple, places)), draws, int(numpy.diff(readers.levels).max())
    )
