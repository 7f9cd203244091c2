"""View of a slot cache for one pass over N tokens of many rows, one after another in a flat batch `[1, N]`.

Linear layers, norms and embeddings compute the N tokens and no padding. Only attention knows rows: it runs group by
group, on rectangles of neighbouring rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillspec.models.language_model import LanguageModel
from distillspec.models.slot_cache import Attend, SlotCache, SlotView, write_tokens


@dataclass(frozen=True)
class RowGroup:
    """Rows that attend together: `count` tokens of the flat batch from `start` on, as a rectangle `[B, q]`.

    Attributes:
        view: use of the cache by the rectangle, where shorter rows are padded.
        queries: `[B · q]` int64, the token of the group in each cell of the rectangle. None: tokens fill it in order.
        back: `[count]` int64, the cell of the rectangle that each token has. None with `queries`.
    """

    view: SlotView
    start: int
    count: int
    queries: Tensor | None = None
    back: Tensor | None = None

    def attend(
        self,
        attend: Attend,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None,
        window: int | None,
        softcap: float | None,
    ) -> Tensor:
        """Return the attention `[count, heads, d]` of the group's part of `query [heads, N, d]`."""
        group_query = query[:, self.start : self.start + self.count]
        if self.queries is not None:
            group_query = group_query.index_select(1, self.queries)
        rectangle = group_query.unflatten(1, self.view.places.shape).transpose(0, 1)
        out = attend(rectangle, keys, values, self.view, scaling, window, softcap).flatten(0, 1)
        return out if self.back is None else out.index_select(0, self.back)


@dataclass(frozen=True)
class FlatView:
    """Use of the cache by one pass over a flat batch: token n is written at `places[n]` of slot `slots[n]`.

    Attributes:
        cache: keys and values of all slots.
        slots: `[N]` int64.
        places: `[N]` int64, `cache.max_len` for padding.
        positions: `[1, N]` int64 for rotary embeddings: the place, in trees the root's place plus the depth.
        groups: rows that attend together, in the order of the tokens.
    """

    cache: SlotCache
    slots: Tensor
    places: Tensor
    positions: Tensor
    groups: tuple[RowGroup, ...]
    _rows: dict[torch.Size, Tensor] = field(default_factory=dict)

    def hidden(self, model: LanguageModel, tokens: Tensor, fed: Tensor | None = None, **named: int) -> Tensor:
        """Run `model`, hooked, over `tokens [1, N]` int64. Return its last states `[N, D]`.

        Args:
            fed: `[N, D]` states of the tokens before, for a draft that reads states.
            named: what its layers read besides.
        """
        states = None if fed is None else fed[None]
        return model.last_states(tokens, self.positions, states, slot_view=self, **named)[0]

    def following(self, places: Tensor, reach: int) -> FlatView:
        """Return the view of the next pass: one more token in each row, at `places [rows]` int64.

        Args:
            places: `cache.max_len` for rows that write nothing.
            reach: places to read in each row.
        """
        positions = places.clamp(max=self.cache.max_len - 1)
        groups = []
        first = 0
        for group in self.groups:
            rows = slice(first, first + len(group.view.slots))
            view_fields = (places[rows, None], positions[rows, None], reach, group.view.slots, group.view.first)
            groups.append(RowGroup(SlotView(self.cache, *view_fields), first, len(group.view.slots)))
            first = rows.stop
        slots = torch.cat([group.view.slots for group in groups])
        return FlatView(self.cache, slots, places, positions[None], tuple(groups))

    def write(self, cached: Tensor, new: Tensor) -> None:
        """Write `new [1, kv, N, d]` into a layer's keys or values."""
        write_tokens(self.cache, cached, new[0].transpose(0, 1), self.slots, self.places, self._rows)

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return `[1, N, heads, d]` of `query [1, heads, N, d]`, group by group."""
        rest = (query[0], keys, values, scaling, window, softcap)
        parts = [group.attend(self.cache.attend, *rest) for group in self.groups]
        return (parts[0] if len(parts) == 1 else torch.cat(parts))[None]
