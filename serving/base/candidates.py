"""Nodes that a drafted tree may have, and the shapes that sets of them make."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, cached_property
from heapq import heappop, heappush
from itertools import islice

import numpy

from distillspec.serving.base.shape import TreeShape
from distillspec.types import Bools, Floats, Ints

MOST_SHAPES = 4096  # trees that are kept
TYPICAL = (0.5, 0.14, 0.07)  # chances of ranks where none were measured

Path = tuple[int, ...]
RankChances = tuple[tuple[float, ...], ...]  # P(a node is accepted | its parent is), by level and rank


class Candidates:
    """Nodes by their paths: the rank at each level, from the root down. Parents and elder siblings come first.

    Attributes:
        paths: of the U nodes.
        depths, ranks, parents: `[U]`: levels from 1 on, the node's own rank, and the place of its parent, −1: the text.
        firsts: `[U]`, nodes that are the first of their siblings. A draft reads their parents for them.
    """

    def __init__(self, paths: Sequence[Path]) -> None:
        self.paths = sorted(paths, key=lambda path: (len(path), path))
        places = {path: place for place, path in enumerate(self.paths)}
        self.depths: Ints = numpy.array([len(path) for path in self.paths], dtype=numpy.int64)
        self.ranks: Ints = numpy.array([path[-1] for path in self.paths], dtype=numpy.int64)
        self.parents: Ints = numpy.array([places.get(path[:-1], -1) for path in self.paths], dtype=numpy.int64)
        self.firsts: Bools = self.ranks == 0
        self.spine: Bools = numpy.array([not any(path) for path in self.paths], dtype=bool)
        self.depth = int(self.depths.max(initial=0))
        self._shapes: dict[bytes, TreeShape] = {}

    def __len__(self) -> int:
        return len(self.paths)

    @cached_property
    def levels(self) -> list[Ints]:
        """Places of the nodes of each level."""
        return [numpy.flatnonzero(self.depths == depth) for depth in range(1, self.depth + 1)]

    def survival(self, chances: Floats) -> Floats:
        """Return P(a node is on the accepted path) `[n, U]`.

        Args:
            chances: `[n, depth, width]`, P(the child of a rank is accepted | its parent is).
        """
        found = numpy.ones((len(chances), len(self) + 1))  # the last one is the text's
        for depth, level in enumerate(self.levels):
            found[:, level] = found[:, self.parents[level]] * chances[:, depth, self.ranks[level]]
        return found[:, :-1]

    def shape(self, taken: Bools) -> TreeShape:
        """Return the tree of the nodes `taken [U]`, with each node its parent and elder siblings."""
        key = taken.tobytes()
        if key not in self._shapes:
            if len(self._shapes) >= MOST_SHAPES:
                self._shapes.clear()
            self._shapes[key] = shape_of([path for path, own in zip(self.paths, taken, strict=True) if own])
        return self._shapes[key]


def shape_of(paths: Sequence[Path]) -> TreeShape:
    """Return the tree of some paths."""
    places = {path: place for place, path in enumerate(sorted(paths))}  # parents and elder siblings come first
    return TreeShape.of_parents([places.get(path[:-1], -1) for path in places])


@cache
def candidates(widths: tuple[int, ...], nodes: int, chances: RankChances = ()) -> Candidates:
    """Return the candidates of trees with at most `widths[i]` children at level i.

    A chain of all levels is among them. Of the others, those of the highest survival are taken, up to `nodes` in all.
    More levels than nodes give the chain alone.

    Args:
        chances: measured ones. Levels without any have the typical ones.
    """
    chain = [(0,) * depth for depth in range(1, len(widths) + 1)]
    others = (path for path in _best_first(widths, chances) if any(path))
    return Candidates([*chain, *islice(others, max(0, nodes - len(chain)))])


def best_tree(widths: tuple[int, ...], nodes: int, chances: RankChances) -> TreeShape:
    """Return the tree of at most `nodes` nodes with the most expected tokens, where the chances of a path multiply.

    Each further node is the one that adds most: no node survives more often than its parent or an elder sibling.
    """
    return shape_of(list(islice(_best_first(widths, chances), nodes)))


def chains(speculation_length: int) -> Candidates:
    """Return the candidates of chains."""
    return candidates((1,) * speculation_length, 0)


def _best_first(widths: Sequence[int], chances: RankChances) -> Iterator[Path]:
    """Yield all paths, those of the highest survival first: behind their parents and elder siblings."""
    waiting: list[tuple[float, Path]] = [(-1.0, ())]
    while waiting:
        _, path = heappop(waiting)
        depth = len(path)
        if path:
            yield path
        if depth < len(widths):
            heappush(waiting, (-_survival((*path, 0), chances), (*path, 0)))
        if path and path[-1] + 1 < widths[depth - 1]:
            younger = (*path[:-1], path[-1] + 1)
            heappush(waiting, (-_survival(younger, chances), younger))


def _survival(path: Path, chances: RankChances) -> float:
    """Return the product of the chances along a path.

    A rank's chance is at most that of the ranks before it. Each rank without a known one has half of the last.
    """
    survival = 1.0
    for level, rank in enumerate(path):
        known = chances[level] if level < len(chances) else TYPICAL
        survival *= min(known[: rank + 1]) * 0.5 ** max(0, rank + 1 - len(known))
    return survival
