"""Key/value cache in pages: memory for the tokens that slots hold, where a device commits it at once.

The tensors are `[1 + pages, heads, tokens of a page, …]`. A block table on the device names the pages of each slot. It
stays where it is and is changed in place, so recorded passes see what the host decided last.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillspec.models.pages import Pages
from distillspec.models.slot_cache import SlotCache, SlotView


@dataclass
class PagedCache(SlotCache):
    """A slot cache in `pages`, which several caches of the same slots share, with their block `table`.

    Caches on other devices or streams have tables of their own. `own_changes` holds the changes that such a one lacks.

    Memory that no slot's text takes is never read, so NaN may stay there. Tokens without a page go to page 0.
    """

    pages: Pages = field(kw_only=True)
    table: Tensor = field(kw_only=True)  # [slots, columns] int32
    own_changes: dict[int, int] | None = field(kw_only=True, default=None)

    @classmethod
    def of(cls, like: SlotCache, pages: Pages, device: torch.device) -> PagedCache:
        """Return an empty cache of the same slots in pages, with a block table on the device."""
        table = torch.zeros(like.slots, pages.columns, dtype=torch.int32, device=device)
        return cls(like.slots, like.max_len, like.attend, pages=pages, table=table)

    def another(self, device: torch.device | None = None) -> PagedCache:
        settings = self.slots, self.max_len, self.attend
        if device is None:
            return PagedCache(*settings, pages=self.pages, table=self.table)
        table = torch.zeros_like(self.table, device=device)
        return PagedCache(*settings, pages=self.pages, table=table, own_changes=self.pages.follow())

    def release(self) -> None:
        super().release()
        if self.own_changes is not None:
            self.pages.leave(self.own_changes)

    @property
    def _changes(self) -> dict[int, int]:
        return self.pages.changes if self.own_changes is None else self.own_changes

    def table_changes(self) -> list[NDArray[numpy.int64]]:
        changes = dict(self._changes)  # a draft's thread may clear them while this one reads
        return [numpy.array(list(part), dtype=numpy.int64) for part in (changes, changes.values())] if changes else []

    def change_table(self, entries: Tensor, pages: Tensor) -> None:
        self.table.view(-1).index_copy_(0, entries, pages.to(torch.int32))
        self._changes.clear()

    def located(self, slots: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        size = self.pages.size
        entries = slots * self.pages.columns + places // size
        return self.table.view(-1).index_select(0, entries.flatten()).view(entries.shape).long(), places % size

    def unpaged(self, keys: Tensor, values: Tensor, view: SlotView) -> tuple[Tensor, Tensor, SlotView]:
        ends = torch.where(view.places < self.max_len, view.places + 1, 0).amax(1)
        reach = view.reach + view.places.shape[1]
        keys, values = (self._rows(cached, view.slots, ends, reach) for cached in (keys, values))
        row_slots = torch.arange(len(view.slots), device=view.slots.device)
        return keys, values, replace(view, cache=SlotCache(len(row_slots), self.max_len), slots=row_slots, first=0)

    def _rows(self, cached: Tensor, slots: Tensor, ends: Tensor, reach: int) -> Tensor:
        """Copy the first `reach` places, or some more, of `slots [B]` out of the pages: `[B, heads, places, …]`.

        Places from `ends [B]` on are zero, whatever their pages hold.
        """
        columns = min(self.pages.needed(reach), self.pages.columns)
        pages = self.table[:, :columns].index_select(0, slots)
        copied = cached.index_select(0, pages.flatten()).unflatten(0, pages.shape).transpose(1, 2).flatten(2, 3)
        there = (pages > 0).repeat_interleave(self.pages.size, 1, output_size=columns * self.pages.size)
        there = there & (torch.arange(copied.shape[2], device=ends.device) < ends[:, None])
        return torch.where(there[:, None, :, None], copied, 0)

    def text(self, cached: Tensor, slot: int, count: int) -> Tensor:
        pages = self.table[slot, : self.pages.needed(count)]
        return cached.index_select(0, pages).transpose(0, 1).flatten(1, 2)[:, :count]

    def zeros(self, like: Tensor, heads: int, dim: int) -> Tensor:
        return like.new_zeros(1 + self.pages.count, heads, self.pages.size, dim)

    def copy_text(self, source: int, destination: int, length: int) -> None:
        tables, size = self.pages.tables, self.pages.size
        pairs = zip(tables[source], tables[destination], strict=False)
        for column, (source_page, own_page) in enumerate(pairs):
            if source_page != own_page and column * size < length:
                self.copy(source_page, own_page, min(size, length - column * size))

    def gather(self, moves: Tensor) -> None:
        slots, *places = moves
        source, destination = (self.located(slots, place) for place in places)
        for cached in self.tensors():
            cached[destination[0], :, destination[1]] = cached[source[0], :, source[1]]

    def drop(self, slot: int, start: int = 0) -> None:
        """Do nothing: `Pages` has given them back already."""

    def clear(self, slot: int, start: int = 0) -> None:
        """Do nothing: the text that is forgotten is never read."""

    def commit(self, slots: int, length: int) -> None:
        """Hold pages for the first `length` places of the first `slots`, as far as there are free ones."""
        for slot in range(slots):
            if len(self.pages.tables[slot]) < self.pages.needed(length) and not self.pages.lacks(slot, length):
                self.pages.resize(slot, length)
