"""Flat batch of one pass: the tokens of all rows, one after another, and where they go. Uploaded in one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillspec.models.ancestors import ancestor_words, see_each_other
from distillspec.models.flat_view import FlatView, RowGroup
from distillspec.models.slot_cache import SlotCache, SlotView
from distillspec.serving.base.transfer import to_device
from distillspec.serving.base.tree import TokenTree

NARROW = 16  # rows of at most so many tokens are windows of drafted tokens, which attend together. Longer ones: prompts

Ints = NDArray[numpy.int64]


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


@dataclass(frozen=True)
class FlatBatch:
    """Input of one pass.

    Attributes:
        tokens: `[1, N]` int64.
        view: where the tokens go, and what they attend to.
        wanted: `[n]` int64, the tokens whose hidden states are wanted, row by row.
    """

    tokens: Tensor
    view: FlatView
    wanted: Tensor

    @classmethod
    def of(cls, cache: SlotCache, rows: Sequence[RowInput], device: torch.device) -> FlatBatch:
        """Return the batch of `rows`, which are in the order of their hidden states."""
        plan = _Plan(cache, rows)
        changes = cache.table_changes()
        own = [part for group in plan.groups for part in group.parts]
        parts = iter(_upload([*changes, *plan.columns(), *own], device))
        if changes:
            cache.change_table(next(parts), next(parts))
        tokens, slots, places, positions, wanted = (next(parts) for _ in range(5))
        groups = tuple(group.uploaded(cache, parts, places, positions) for group in plan.groups)
        return cls(tokens[None], FlatView(cache, slots, places, positions[None], groups), wanted)


class _Plan:
    """The numbers of a batch on the host."""

    def __init__(self, cache: SlotCache, rows: Sequence[RowInput]) -> None:
        self.rows = rows
        self.counts = numpy.array([len(row.tokens) for row in rows])
        self.offsets = numpy.concatenate([[0], self.counts.cumsum()])
        self.steps = numpy.arange(self.offsets[-1]) - self.offsets[:-1].repeat(self.counts)
        self.places = numpy.array([row.start for row in rows]).repeat(self.counts) + self.steps
        self.groups = [_Group(self, cache, first, end) for first, end in _neighbours(rows)]

    def columns(self) -> list[Ints]:
        """Return tokens, slots, places and positions `[N]`, and the wanted tokens `[n]`."""
        tokens = numpy.concatenate([numpy.asarray(row.tokens, dtype=numpy.int64) for row in self.rows])
        slots = numpy.array([row.slot for row in self.rows]).repeat(self.counts)
        ends = zip(self.offsets[1:], self.rows, strict=True)
        wanted = numpy.concatenate([numpy.arange(end - row.wanted, end) for end, row in ends])
        return [tokens, slots, self.places, self._positions(), wanted]

    def _positions(self) -> Ints:
        positions = self.places.copy()
        for row, offset in zip(self.rows, self.offsets, strict=False):
            if row.is_wide and row.tree is not None:
                depths = [0, *row.tree.depths] if row.rooted else [depth - 1 for depth in row.tree.depths]
                positions[offset : offset + len(row.tokens)] = [row.start + depth for depth in depths]
        return positions


class _Group:
    """Rows `first … end` of a plan, which attend together. `parts` are uploaded with everything else."""

    def __init__(self, plan: _Plan, cache: SlotCache, first: int, end: int) -> None:
        self.rows = plan.rows[first:end]
        self.start, counts = int(plan.offsets[first]), plan.counts[first:end]
        self.width = int(counts.max())
        self.count, self.even = int(counts.sum()), bool((counts == self.width).all())
        self.wide = any(row.is_wide or row.mutual for row in self.rows)
        self.reach = cache.reach(max(row.end for row in self.rows))
        self.parts = [numpy.array([row.slot for row in self.rows])]
        if not self.even:
            columns = numpy.arange(self.width)
            starts = plan.offsets[first:end, None] - self.start
            queries = starts + numpy.minimum(columns, counts[:, None] - 1)
            places = plan.places[self.start :][queries]
            places[columns >= counts[:, None]] = cache.max_len
            own = slice(self.start, self.start + self.count)
            back = numpy.arange(len(counts)).repeat(counts) * self.width + plan.steps[own]
            self.parts += [queries.ravel(), places.ravel(), back]
        if self.wide:
            self.parts.append(numpy.array([row.start for row in self.rows]))
            words = ancestor_words([row.parents for row in self.rows], self.width)
            for own, row in zip(words, self.rows, strict=True):
                see_each_other(own, len(row.tokens), row.mutual)
            self.parts.append(words.ravel())

    def uploaded(self, cache: SlotCache, parts: Iterator[Tensor], places: Tensor, positions: Tensor) -> RowGroup:
        """Return the group on the device, taking its own `parts`."""
        shape, own = (len(self.rows), self.width), slice(self.start, self.start + self.count)
        slots, queries, back = next(parts), None, None
        places, positions = places[own], positions[own]
        if not self.even:
            queries, places, back = next(parts), next(parts), next(parts)
            positions = positions[queries]
        view = SlotView(
            cache,
            places.view(shape),
            positions.view(shape),
            self.reach,
            slots,
            self.rows[0].slot,  # neighbours, see `_neighbours`
            next(parts) if self.wide else None,
            next(parts).view(*shape, -1) if self.wide else None,
        )
        return RowGroup(view, self.start, self.count, queries, back)


def _neighbours(rows: Sequence[RowInput]) -> list[tuple[int, int]]:
    """Split rows into runs (first, end) of neighbouring slots that attend together: windows, or prompts of one length.

    A rectangle of neighbours is read from the cache without a copy. Prompts of unlike lengths would pad each other.
    """
    runs: list[tuple[int, int]] = []
    for place, row in enumerate(rows):
        joins = place > 0 and rows[place - 1].slot + 1 == row.slot and _alike(rows[place - 1], row)
        runs.append((runs.pop()[0] if joins else place, place + 1))
    return runs


def _alike(one: RowInput, other: RowInput) -> bool:
    lengths = len(one.tokens), len(other.tokens)
    return max(lengths) <= NARROW or lengths[0] == lengths[1]


def _upload(columns: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Upload all columns in one transfer."""
    whole = to_device(torch.from_numpy(numpy.concatenate(columns)), device)
    return list(whole.split([len(column) for column in columns]))
