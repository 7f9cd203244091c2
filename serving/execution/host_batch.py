"""Numbers of a flat batch on the host: the tokens of all rows, one after another, and where they go."""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.models.ancestors import ancestor_words, see_each_other
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.execution.row_input import RowInput
from distillspec.types import Ints

NARROW = 16  # rows of at most so many tokens are windows of drafted tokens, which attend together, others prompts


class HostBatch:
    """Numbers of one pass over N tokens of B rows.

    Args:
        cache: that the rows are slots of.
        rows: in the order of their hidden states.
        newest_alone: only the first of each row's wanted tokens is wanted.

    Attributes:
        slots, starts: `[B]`, of the rows.
        counts: `[B]`, their tokens.
        offsets: `[B + 1]`, where their tokens begin and end.
        places: `[N]`, where the tokens are written.
        groups: rows that attend together, in order.
    """

    def __init__(self, cache: SlotCache, rows: Sequence[RowInput], *, newest_alone: bool = False) -> None:
        self.rows, self._newest_alone = rows, newest_alone
        self._last = cache.max_len - 1  # position
        self.slots = numpy.array([row.slot for row in rows])
        self.counts = numpy.array([len(row.tokens) for row in rows])
        self.offsets = numpy.concatenate([[0], self.counts.cumsum()])
        self.steps = numpy.arange(self.offsets[-1]) - self.offsets[:-1].repeat(self.counts)  # behind each row's start
        self.starts = numpy.array([row.start for row in rows])
        self.places = self.starts.repeat(self.counts) + self.steps
        self.groups = [HostGroup(self, cache, first, end) for first, end in _neighbours(rows)]

    def __len__(self) -> int:
        """Return N."""
        return len(self.places)

    @property
    def reach(self) -> int:
        """Places to read in each row."""
        return max(group.reach for group in self.groups)

    @property
    def wants_all(self) -> bool:
        """True if the states of all tokens are wanted."""
        return not self._newest_alone and all(row.wanted == len(row.tokens) for row in self.rows)

    @property
    def tokens(self) -> Ints:
        """`[N]`."""
        return numpy.array([token for row in self.rows for token in row.tokens], dtype=numpy.int64)

    @property
    def newest(self) -> Ints:
        """`[B]`, the first wanted token of each row, the last one of rows that want none."""
        return self.offsets[1:] - numpy.array([max(row.wanted, 1) for row in self.rows])

    @property
    def ends(self) -> Ints:
        """`[B]`, the place behind that token."""
        return self.starts + self.newest - self.offsets[:-1] + 1

    @property
    def wanted(self) -> Ints:
        """The tokens whose hidden states are wanted, row by row."""
        if self._newest_alone:
            return self.newest
        ends = zip(self.offsets[1:], self.rows, strict=True)
        return numpy.concatenate([numpy.arange(end - row.wanted, end) for end, row in ends])

    @property
    def positions(self) -> Ints:
        """`[N]`, of rotary embeddings, within the context: the place, in trees the root's place plus the depth."""
        positions = numpy.minimum(self.places, self._last)
        for row, offset in zip(self.rows, self.offsets, strict=False):
            if row.is_wide:
                positions[offset : offset + len(row.tokens)] = [row.start + depth for depth in row.depths]
        return positions


class HostGroup:
    """Rows `first … end` of a batch, which attend together: a rectangle `[rows, width]` of neighbouring slots.

    Attributes:
        start, count: its tokens in the batch.
        even: all rows have as many tokens.
        wide: some are trees, or see later tokens.
        reach: places to read in each slot.
    """

    def __init__(self, batch: HostBatch, cache: SlotCache, first: int, end: int) -> None:
        self.rows = batch.rows[first:end]
        self.slots = batch.slots[first:end]
        self._counts = batch.counts[first:end]
        self.start = int(batch.offsets[first])
        self.width = int(self._counts.max())
        self.count = int(batch.offsets[end]) - self.start
        self.even = self.count == self.width * len(self.rows)
        self.wide = any(row.is_wide or row.mutual for row in self.rows)
        self.reach = cache.reach(max(row.end for row in self.rows))
        tokens = slice(self.start, self.start + self.count)
        self._places = batch.places[tokens]
        self._steps = batch.steps[tokens]
        self._spare = cache.max_len  # place

    @property
    def rectangle(self) -> tuple[Ints, Ints, Ints]:
        """The token in each cell of the rectangle, and the cell of each token.

        Returns:
            The group's token in each cell and the place where it is written, both `[rows · width]`, and the cell of
            each token `[count]`. Cells that only pad have the row's last token, written to the spare place.
        """
        if self.even:
            order = numpy.arange(self.count)
            return order, self._places, order
        columns, counts = numpy.arange(self.width), self._counts[:, None]
        starts = self._counts.cumsum()[:, None] - counts
        queries = starts + numpy.minimum(columns, counts - 1)
        places = self._places[queries]
        places[columns >= counts] = self._spare
        back = numpy.arange(len(counts)).repeat(self._counts) * self.width + self._steps
        return queries.ravel(), places.ravel(), back

    @property
    def ancestors(self) -> tuple[Ints, Ints]:
        """The place of each row's root `[rows]`, and the ancestors of its tokens as words `[rows · width · words]`."""
        words = ancestor_words([row.parents for row in self.rows], self.width)
        for row_words, row in zip(words, self.rows, strict=True):
            see_each_other(row_words, len(row.tokens), row.mutual)
        return numpy.array([row.start for row in self.rows]), words.ravel()


def _neighbours(rows: Sequence[RowInput]) -> list[tuple[int, int]]:
    """Split rows into runs (first, end) of neighbouring slots that attend together: windows, or prompts of one length.

    A rectangle of neighbours is read from the cache without a copy. Prompts of unlike lengths would pad each other.
    """
    runs: list[tuple[int, int]] = []
    for index, row in enumerate(rows):
        joins = index > 0 and rows[index - 1].slot + 1 == row.slot and _alike(rows[index - 1], row)
        runs.append((runs.pop()[0] if joins else index, index + 1))
    return runs


def _alike(row: RowInput, other: RowInput) -> bool:
    lengths = len(row.tokens), len(other.tokens)
    return max(lengths) <= NARROW or lengths[0] == lengths[1]
