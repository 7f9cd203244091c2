"""Static key/value cache of slots, for any decoder-only transformers model (`slot_attention` hooks it in).

Each layer holds `[slot, kv_head, place, head_dim]`, so that the keys a head reads lie one after another. Nothing is
copied to grow: a forward pass writes each token at its own place of its row's slot and reads a view of the slots' first
places. Rolling back means not counting the last places. On Linux's CPUs only the places that were written take memory.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from distillspec.models.ancestors import ancestor_mask
from distillspec.models.lazy_memory import commits_lazily, give_back, lazy_zeros, tokens_a_page
from distillspec.native.place_kernel import PlaceMoves, place_kernel

BUCKET = 64  # the number of keys read is rounded up to this, so that few shapes occur


class Attend(Protocol):
    """Interface of attention over a slot cache."""

    def __call__(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        view: SlotView,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return `[B, q, heads, d]`. Padding tokens may give any finite values.

        Args:
            query: `[B, heads, q, d]`.
            keys, values: the layer's tensors in the cache, with this pass's tokens written.
        """
        ...


def masked_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: SlotView,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend by torch's own operations, for any device, chains and trees: a mask over the longest row's keys.

    Grouped queries are folded into query rows, so that keys are never repeated.
    """
    keys, values, view = view.cache.unpaged(keys, values, view)
    batch, heads, q, dim = query.shape
    key, value = view.read(keys), view.read(values)
    mask = view.mask(window, heads // key.shape[1], query.dtype)
    folded = query.reshape(batch, key.shape[1], -1, dim)
    if softcap is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = (folded @ key.transpose(-1, -2)) * (scaling if scaling is not None else dim**-0.5)
        scores = torch.tanh(scores / softcap) * softcap
        out = torch.softmax(scores + mask, dim=-1) @ value
    return out.reshape(batch, heads, q, dim).transpose(1, 2)


def write_tokens(
    cache: SlotCache, cached: Tensor, new: Tensor, slots: Tensor, places: Tensor, rows: dict[torch.Size, Tensor]
) -> None:
    """Write `new [N, heads, d]` at `places [N]` of `slots [N]` of one of the cache's tensors.

    Args:
        cached: `[slots, heads, places, d]`, or pages of it.
        rows: by the shape of `cached` where the vectors go. Keep it for a pass, since all layers write alike.
    """
    if cached.shape not in rows:
        slots, places = cache.located(slots, places)
        heads = torch.arange(cached.shape[1], device=slots.device)
        rows[cached.shape] = ((slots[:, None] * cached.shape[1] + heads) * cached.shape[2] + places[:, None]).flatten()
    # One index for all: with several, torch starts all its threads for a few kilobytes.
    cached.flatten(0, 2).index_copy_(0, rows[cached.shape], new.flatten(0, 1))


@dataclass
class SlotCache:
    """Keys and values of `slots` sequences of at most `max_len` tokens. Layers are made on first use.

    The place `max_len` of a slot takes what padding writes and is never read. `features` are hidden states of the same
    tokens, if `FeatureTap` keeps some.
    """

    slots: int
    max_len: int
    attend: Attend = masked_attention
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)
    features: Tensor | None = None  # [slots, 1, places, F]
    state_ids: tuple[int, ...] = ()  # of the states that are kept
    lacking: dict[int, range] = field(default_factory=dict, kw_only=True)  # by slot, places whose states are missing
    _lazy: bool = False  # its tensors are lazy zeros
    _move: PlaceMoves = field(default_factory=PlaceMoves, init=False, repr=False, compare=False)

    def another(self, device: torch.device | None = None) -> SlotCache:
        """Return an empty cache of the same slots for another model. `device`: its own, if it runs beside this one."""
        return SlotCache(self.slots, self.max_len, self.attend)

    def table_changes(self) -> list[NDArray[numpy.int64]]:
        """Return entries of the block table and their pages, two arrays, or nothing if the device's is up to date."""
        return []

    def change_table(self, entries: Tensor, pages: Tensor) -> None:
        """Take over `table_changes` that are on the device, int64."""
        raise AssertionError("slots have no block table")

    def located(self, slots: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """Return where tokens are in the tensors: the rows, and the places in those rows, both int64 as given."""
        return slots, places

    def unpaged(self, keys: Tensor, values: Tensor, view: SlotView) -> tuple[Tensor, Tensor, SlotView]:
        """Return keys and values by slot and place, and the view of them. Pages are copied to rows of their own."""
        return keys, values, view

    def text(self, cached: Tensor, slot: int, count: int) -> Tensor:
        """Return the first `count` places of a slot in one of the tensors, `[heads, count, …]`."""
        return cached[slot, :, :count]

    def tensors(self) -> Iterator[Tensor]:
        """Yield all that is held by slot and place, `[slots, heads, places, …]` each."""
        for layer in self.layers.values():
            yield from layer
        if self.features is not None:
            yield self.features

    def kept_states(self, like: Tensor, width: int) -> Tensor:
        """Return `features`, `[slots, 1, places, len(state_ids) · width]` typed as `like`, made on first use."""
        if self.features is None:
            self.features = self.zeros(like, 1, len(self.state_ids) * width)
        return self.features

    def release(self) -> None:
        """Free everything."""
        self.layers.clear()
        self.features = None

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the layer's keys and values, `[slots, kv_heads, places, head_dim]` each, typed as `like`."""
        if index not in self.layers:
            self.layers[index] = (self.zeros(like, *like.shape[1::2]), self.zeros(like, *like.shape[1::2]))
        return self.layers[index]

    def zeros(self, like: Tensor, heads: int, dim: int) -> Tensor:
        """Return zeros `[slots, heads, places, dim]`, typed as `like`. Lazy ones have whole pages for each head."""
        slot_len = self.max_len + 1
        if not commits_lazily(like.device):
            return like.new_zeros(self.slots, heads, slot_len, dim)
        self._lazy = True
        place_kernel()  # built now: in a step, answers would wait for it
        page = tokens_a_page(dim * like.itemsize)
        return lazy_zeros((self.slots, heads, -(-slot_len // page) * page, dim), like.dtype)

    def copy(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` places of one row of the tensors, a slot or a page, over another's."""
        for cached in self.tensors():
            cached[destination, :, :length] = cached[source, :, :length]

    def copy_text(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` places of one slot over another's. Both have room for them."""
        self.copy(source, destination, length)

    def gather(self, moves: Tensor) -> None:
        """Copy tokens to other places of their slots: accepted paths. `moves [3, n]` int64, see `PlaceMoves`."""
        self._move(list(self.tensors()), moves)

    def drop(self, slot: int, start: int = 0) -> None:
        """Give back the memory of a slot from a place on, where the system takes memory back."""
        if self._lazy:
            self.clear(slot, start)

    def commit(self, slots: int, length: int) -> None:
        """Take the memory of the first `length` places of the first `slots`: reading pages never written is faster."""
        if self._lazy:
            for cached in self.tensors():
                cached[:slots, :, :length].zero_()

    def clear(self, slot: int, start: int = 0) -> None:
        """Zero a slot from a place on, where NaNs were written: a masked NaN times weight 0 is NaN."""
        for cached in self.tensors():
            if not self._lazy:
                cached[slot, :, start:].zero_()
                continue
            for part in cached[slot] if start else cached[slot : slot + 1]:
                give_back(part[start:] if start else part)

    def reach(self, longest: int) -> int:
        """Return the number of places to read when the longest row holds `longest` tokens."""
        return min(-(-longest // BUCKET) * BUCKET, self.max_len)


@dataclass(frozen=True)
class SlotView:
    """Use of the cache by one forward pass: token j of row r is written at `places[r, j]` of its slot.

    Every token attends to the places up to its own. With `ancestors`, row r's tokens are the nodes of a tree that
    starts at place `base[r]`: a node attends to the places before the base, its ancestors and itself.
    """

    cache: SlotCache
    places: Tensor  # [B, q] int64, cache.max_len for padding
    positions: Tensor  # [B, q] int64, what rotary embeddings see: the place, for trees base + depth
    reach: int  # places read a row, see SlotCache.reach
    slots: Tensor  # [B] int64
    first: int | None = None  # rows are the slots first, first + 1, …: read without a copy
    base: Tensor | None = None  # [B] int64, contiguous, with ancestors
    ancestors: Tensor | None = None  # [B, q, words] int64, see `ancestor_words`
    _kept: dict[Hashable, Tensor] = field(default_factory=dict)
    _rows: dict[torch.Size, Tensor] = field(default_factory=dict)

    @classmethod
    def append(
        cls,
        cache: SlotCache,
        slots: Sequence[int],
        starts: Tensor,
        counts: Tensor,
        longest: int | None = None,
        width: int | None = None,
    ) -> SlotView:
        """Return a view for chains: `counts[r]` tokens after the first `starts[r]` of `slots[r]`, the rest is padding.

        Args:
            starts, counts: int64 `[B]` on the model's device.
            longest, width: the largest start + count, and the largest count. None reads them from the tensors.
        """
        width = int(counts.max()) if width is None else width
        steps = torch.arange(width, device=starts.device)
        places = torch.where(steps < counts[:, None], starts[:, None] + steps, cache.max_len)
        reach = cache.reach(int((starts + counts).max()) if longest is None else longest)
        contiguous = list(slots) == list(range(slots[0], slots[0] + len(slots)))
        rows = torch.tensor(list(slots), device=starts.device)
        return cls(cache, places, places.clamp(max=cache.max_len - 1), reach, rows, slots[0] if contiguous else None)

    def write(self, cached: Tensor, new: Tensor) -> None:
        """Write `new [B, kv, q, d]` into a layer's keys or values."""
        slots = self.slots[:, None].expand_as(self.places)
        tokens = new.transpose(1, 2).flatten(0, 1)
        write_tokens(self.cache, cached, tokens, slots.flatten(), self.places.flatten(), self._rows)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return `[B, q, heads, d]` of `query [B, heads, q, d]`, by the cache's attention."""
        return self.cache.attend(query, keys, values, self, scaling, window, softcap)

    def read(self, cached: Tensor) -> Tensor:
        """Return `[B, kv, reach, d]` of a layer's keys or values, a view if the rows are contiguous."""
        rows = self.slots if self.first is None else slice(self.first, self.first + len(self.slots))
        return cached[rows, :, : self.reach]

    def mask(self, window: int | None, groups: int, dtype: torch.dtype) -> Tensor:
        """Return the term added to scores, `[B, 1, groups · q, reach]`: 0 where a folded query attends, else −inf."""
        return self.kept(
            (window, groups, dtype),
            lambda: torch.where(self._visible(window).repeat(1, groups, 1)[:, None], 0.0, -torch.inf).to(dtype),
        )

    def kept(self, key: Hashable, make: Callable[[], Tensor]) -> Tensor:
        """Return what `make` makes, once a pass: all layers attend alike."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    def _visible(self, window: int | None) -> Tensor:
        key_place = torch.arange(self.reach, device=self.places.device)
        if self.ancestors is None:
            seen = key_place <= self.places[..., None]
            return seen if window is None else seen & (key_place > self.positions[..., None] - window)
        assert self.base is not None
        node = key_place - self.base[:, None]  # [B, reach]: the tree's node at each place
        inside = (node >= 0) & (node < self.places.shape[1])
        safe = node.clamp(0, self.places.shape[1] - 1)
        index = safe[:, None].expand(-1, self.places.shape[1], -1)
        seen = torch.where(inside[:, None], ancestor_mask(self.ancestors).gather(2, index), (node < 0)[:, None])
        if window is None:
            return seen
        position = torch.where(inside, self.positions.gather(1, safe), key_place)
        return seen & (position[:, None] > self.positions[..., None] - window)
