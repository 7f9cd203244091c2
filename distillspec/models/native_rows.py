"""Rows of a pass, as numbers that the kernel reads (`Batch` of `layers.h`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy

from distillspec.models.ancestors import KEPT, WORD, ancestor_sets, signed_word
from distillspec.models.few_queries import row_numbers
from distillspec.models.flat_view import FlatView, RowGroup
from distillspec.types import Ints

CHAIN = (*((2 << token) - 1 for token in range(WORD - 1)), -1)  # what the first tokens of a chain see of it


class NativeRows(NamedTuple):
    """N tokens of R rows, one row after another.

    Attributes:
        tokens: `[4, N]`: slots, of the cache; places, where each token is written; positions, for rotary angles; nodes,
            bit i: the token sees new token i of its row, −1: all before it and itself.
        rows: `[R, 5]`: first token, tokens, slot, first new place, end.
    """

    tokens: Ints
    rows: Ints

    @staticmethod
    def of(view: FlatView) -> NativeRows:
        """Return the rows of a view of a cache on the CPU."""
        rows, nodes, first = [], [], 0
        for group in view.groups:
            group_rows, seen = _single_token_rows(group) if group.view.places.shape[1] == 1 else _padded_rows(group)
            group_rows[:, 0] += first
            first += group.count
            rows.append(group_rows)
            nodes.append(seen)
        parts = (view.slots, view.places, view.positions.view(-1))
        return NativeRows(
            numpy.stack([*(part.numpy() for part in parts), numpy.concatenate(nodes)]), numpy.concatenate(rows)
        )

    @staticmethod
    def chains(slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> NativeRows:
        """Return rows that go on behind the first `starts` tokens of their slots, by so many tokens each."""
        return NativeRows.windows([()] * len(counts), slots, starts, counts)

    @staticmethod
    def windows(
        trees: Sequence[tuple[int, ...]], slots: Sequence[int], starts: Sequence[int], counts: Sequence[int]
    ) -> NativeRows:
        """Return the rows of `chains`, where the tokens of some are trees.

        Plain lists: with caches that hold none of this code, numpy's functions take three times as long.

        Args:
            trees: the parent of each token of a row, an earlier one or −1. Empty for chains.
        """
        token_slots, places, positions, nodes = list[int](), list[int](), list[int](), list[int]()
        rows = list[Sequence[int]]()
        for parents, slot, start, count in zip(trees, slots, starts, counts, strict=True):
            rows.append((len(token_slots), count, slot, start, start + count))
            token_slots += [slot] * count
            places += range(start, start + count)
            if parents:
                depths, seen = _of_tree(parents, count)
                positions += [start + depth for depth in depths]
                nodes += seen
            else:
                positions += range(start, start + count)
                nodes += CHAIN[:count] if count <= WORD else (*CHAIN, *[-1] * (count - WORD))
        table = numpy.array([token_slots, places, positions, nodes], dtype=numpy.int64)
        return NativeRows(table, numpy.array(rows, dtype=numpy.int64))

    @staticmethod
    def slices(
        most: int,
        trees: Sequence[tuple[int, ...]],
        slots: Sequence[int],
        starts: Sequence[int],
        counts: Sequence[int],
    ) -> Iterator[NativeRows]:
        """Yield the rows of `windows` in passes of at most `most` tokens, to be read in order.

        Chains may be cut anywhere. Trees are whole, and have at most `most` tokens.
        """
        left, pieces = most, list[tuple[tuple[int, ...], int, int, int]]()
        for parents, slot, start, count in zip(trees, slots, starts, counts, strict=True):
            while count > left:
                taken = 0 if parents else left
                if taken:
                    pieces.append((parents, slot, start, taken))
                yield NativeRows.windows(*zip(*pieces, strict=True))
                start += taken
                count -= taken
                left, pieces = most, []
            pieces.append((parents, slot, start, count))
            left -= count
        if pieces:
            yield NativeRows.windows(*zip(*pieces, strict=True))

    @property
    def total(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @property
    def numbers(self) -> list[int]:
        """N, R, and the addresses of all parts. They are those of this object: keep it while they are read."""
        first, size = self.tokens.ctypes.data, self.tokens.strides[0]
        return [self.total, len(self.rows), *range(first, first + 4 * size, size), self.rows.ctypes.data, 0]


@lru_cache(maxsize=KEPT)
def _of_tree(parents: tuple[int, ...], count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return how many ancestors each node has, and what it sees as a signed word."""
    sets = ancestor_sets(parents, count)
    depths = tuple([bits.bit_count() - 1 for bits in sets])
    return depths, tuple(map(signed_word, sets) if count >= WORD else sets)


def _single_token_rows(group: RowGroup) -> tuple[Ints, Ints]:
    """Rows of one token each."""
    places = group.view.places.numpy()[:, 0]
    rows = numpy.empty((len(places), 5), dtype=numpy.int64)
    rows[:, 0] = numpy.arange(len(places))
    rows[:, 1] = 1
    rows[:, 2] = group.view.slots.numpy()
    rows[:, 3] = places
    rows[:, 4] = places + (places < group.view.cache.max_len)
    return rows, numpy.ones(len(places), dtype=numpy.int64)


def _padded_rows(group: RowGroup) -> tuple[Ints, Ints]:
    """Rows of several tokens, the shorter ones padded."""
    numbers = row_numbers(group.view, None)
    width = group.view.places.shape[1]
    counts = numbers[:, 2] - numbers[:, 1] if group.queries is not None else numpy.full(len(numbers), width)
    starts = counts.cumsum() - counts
    rows = numpy.stack([starts, counts, *numbers[:, :3].T], 1)
    real = numpy.arange(width) < counts[:, None]
    return rows, numbers[:, 3 + width :][real]
