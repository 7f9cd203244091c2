"""Rows of a pass over few tokens, as numbers that the kernel reads (`Batch` of `layers.h`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from distillspec.models.ancestors import ancestor_words
from distillspec.models.few_queries import row_numbers
from distillspec.models.flat_view import FlatView, RowGroup

Ints = NDArray[numpy.int64]


class FewRows(NamedTuple):
    """N tokens of R rows, one row after another.

    Attributes:
        slots: `[N]`, of the cache.
        places: `[N]`, where each token is written.
        positions: `[N]`, for rotary angles.
        nodes: `[N]`, bit i: the token sees new token i of its row, −1: all before it and itself.
        rows: `[R, 5]`: first token, tokens, slot, first new place, end.
    """

    slots: Ints
    places: Ints
    positions: Ints
    nodes: Ints
    rows: Ints

    @staticmethod
    def of(view: FlatView) -> FewRows:
        """Return the rows of a view of a cache on the CPU."""
        rows, nodes, first = [], [], 0
        for group in view.groups:
            own, seen = _of_one(group) if group.view.places.shape[1] == 1 else _of_some(group)
            own[:, 0] += first
            first += group.count
            rows.append(own)
            nodes.append(seen)
        slots, places, positions = (part.contiguous().numpy() for part in (view.slots, view.places, view.positions))
        return FewRows(slots, places, positions, numpy.concatenate(nodes), numpy.concatenate(rows))

    @staticmethod
    def chains(slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> FewRows:
        """Return rows that go on behind the first `starts` tokens of their slots, by so many tokens each."""
        many = numpy.array(counts, dtype=numpy.int64)
        first = many.cumsum() - many
        rows = numpy.array([*zip(first.tolist(), counts, slots, starts, starts, strict=True)], dtype=numpy.int64)
        rows[:, 4] += many
        steps = numpy.arange(first[-1] + many[-1]) - first.repeat(many)
        places = rows[:, 3].repeat(many) + steps
        # 2 << 63 and beyond is 0, so that −1 remains: all bits.
        return FewRows(rows[:, 2].repeat(many), places, places.copy(), (2 << steps) - 1, rows)

    @staticmethod
    def windows(
        trees: Sequence[Sequence[int]], slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> FewRows:
        """Return the rows of `chains`, where the tokens of some are trees.

        Args:
            trees: the parent of each token of a row, an earlier one or −1. Empty for chains.
        """
        found = FewRows.chains(slots, starts, counts)
        for parents, start, first in zip(trees, starts, found.rows[:, 0].tolist(), strict=True):
            if parents:
                own = slice(first, first + len(parents))
                found.nodes[own] = ancestor_words([parents], len(parents))[0, :, 0]
                found.positions[own] = [start + depth for depth in _depths(parents)]
        return found

    @staticmethod
    def slices(most: int, slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> Iterator[FewRows]:
        """Yield the same in passes of at most `most` tokens, to be read in order: chains may be cut anywhere."""
        left, pieces = most, list[tuple[int, int, int]]()
        for slot, start, count in zip(slots, starts, counts, strict=True):
            while count > left:
                if left:
                    pieces.append((slot, start, left))
                yield FewRows.chains(*zip(*pieces, strict=True))
                start, count, left, pieces = start + left, count - left, most, []
            pieces.append((slot, start, count))
            left -= count
        if pieces:
            yield FewRows.chains(*zip(*pieces, strict=True))

    @property
    def numbers(self) -> list[int]:
        """N, R, and the addresses of all parts. They are those of this object: keep it while they are read."""
        return [len(self.slots), len(self.rows), *(part.ctypes.data for part in self), 0]


def _depths(parents: Sequence[int]) -> list[int]:
    """Return the number of ancestors of each node."""
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def _of_one(group: RowGroup) -> tuple[Ints, Ints]:
    """Rows of one token each."""
    places = group.view.places.numpy()[:, 0]
    rows = numpy.empty((len(places), 5), dtype=numpy.int64)
    rows[:, 0] = numpy.arange(len(places))
    rows[:, 1] = 1
    rows[:, 2] = group.view.slots.numpy()
    rows[:, 3] = places
    rows[:, 4] = places + (places < group.view.cache.max_len)
    return rows, numpy.ones(len(places), dtype=numpy.int64)


def _of_some(group: RowGroup) -> tuple[Ints, Ints]:
    """Rows of several tokens, the shorter ones padded."""
    found = row_numbers(group.view, None)
    width = group.view.places.shape[1]
    counts = found[:, 2] - found[:, 1] if group.queries is not None else numpy.full(len(found), width)
    starts = counts.cumsum() - counts
    rows = numpy.stack([starts, counts, *found[:, :3].T], 1)
    real = numpy.arange(width) < counts[:, None]
    return rows, found[:, 3 + width :][real]
