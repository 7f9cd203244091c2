"""Flat batch of one pass, on the device: the tokens of all rows, one after another. Uploaded in one transfer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from distillspec.models.flat_view import FlatView, RowGroup
from distillspec.models.slot_cache import SlotCache, SlotView
from distillspec.serving.base.transfer import to_device
from distillspec.serving.execution.host_batch import HostBatch, HostGroup
from distillspec.serving.execution.row_input import RowInput
from distillspec.types import Ints


class OnDevice(NamedTuple):
    """Tensors of a batch of N tokens."""

    tokens: Tensor  # [1, N] int64
    view: FlatView  # where the tokens go, and what they attend to
    wanted: Tensor  # [n] int64, the tokens whose hidden states are wanted, row by row


class FlatBatch:
    """Input of one pass.

    It is uploaded once something asks for its tensors. A recorded pass does not: it takes the host's numbers straight
    into its own buffers (`PassInputs`).

    Args:
        host: the numbers on the host. None: those on the device are all there is.
        cache, device: to upload to.
        newest: `[1, N]` int64, the tokens, where the device alone knows them. The host has others in their places.
    """

    def __init__(
        self, host: HostBatch | None, cache: SlotCache, device: torch.device, newest: Tensor | None = None
    ) -> None:
        self.host, self.newest = host, newest
        self._cache, self._device = cache, device

    @classmethod
    def of(
        cls, cache: SlotCache, rows: Sequence[RowInput], device: torch.device, *, newest_alone: bool = False
    ) -> FlatBatch:
        """Return the batch of `rows`, which are in the order of their hidden states.

        `newest_alone`: see `HostBatch`.
        """
        return cls(HostBatch(cache, rows, newest_alone=newest_alone), cache, device)

    @classmethod
    def on_device(cls, tokens: Tensor, view: FlatView, wanted: Tensor) -> FlatBatch:
        """Return a batch whose numbers the host does not know."""
        batch = cls(None, view.cache, tokens.device)
        batch.__dict__["_uploaded"] = OnDevice(tokens, view, wanted)
        return batch

    @property
    def tokens(self) -> Tensor:
        return self._uploaded.tokens if self.newest is None else self.newest

    @property
    def view(self) -> FlatView:
        return self._uploaded.view

    @property
    def wanted(self) -> Tensor:
        if self.host is not None and "_uploaded" not in self.__dict__:  # a recorded pass needed no more
            return to_device(torch.from_numpy(self.host.wanted), self._device)
        return self._uploaded.wanted

    @cached_property
    def _uploaded(self) -> OnDevice:
        assert self.host is not None
        host, cache = self.host, self._cache
        changes = cache.table_changes()
        columns = [host.tokens, host.slots.repeat(host.counts), host.places, host.positions, host.wanted]
        of_groups = [part for group in host.groups for part in _parts(group)]
        parts = iter(_upload([*changes, *columns, *of_groups], self._device))
        if changes:
            cache.change_table(next(parts), next(parts))
        tokens, slots, places, positions, wanted = (next(parts) for _ in columns)
        groups = tuple(_uploaded(group, cache, parts, places, positions) for group in host.groups)
        return OnDevice(tokens[None], FlatView(cache, slots, places, positions[None], groups), wanted)


def upload_table(cache: SlotCache, device: torch.device) -> None:
    """Upload what has changed in the cache's block table."""
    if changes := cache.table_changes():
        cache.change_table(*_upload(changes, device))


def _parts(group: HostGroup) -> list[Ints]:
    """Return a group's numbers in the order in which `_uploaded` takes them."""
    return [group.slots, *(() if group.even else group.rectangle), *(group.ancestors if group.wide else ())]


def _uploaded(
    group: HostGroup, cache: SlotCache, parts: Iterator[Tensor], places: Tensor, positions: Tensor
) -> RowGroup:
    """Return the group on the device, taking its own `parts`. `places`, `positions`: `[N]` of the whole batch."""
    shape, tokens = (len(group.rows), group.width), slice(group.start, group.start + group.count)
    slots, queries, back = next(parts), None, None
    places, positions = places[tokens], positions[tokens]
    if not group.even:
        queries, places, back = next(parts), next(parts), next(parts)
        positions = positions[queries]
    view = SlotView(
        cache,
        places.view(shape),
        positions.view(shape),
        group.reach,
        slots,
        group.rows[0].slot,  # neighbours
        next(parts) if group.wide else None,
        next(parts).view(*shape, -1) if group.wide else None,
    )
    return RowGroup(view, group.start, group.count, queries, back)


def _upload(columns: Sequence[Ints], device: torch.device) -> list[Tensor]:
    """Upload all columns in one transfer."""
    whole, parts = laid_out(columns)
    uploaded = to_device(torch.from_numpy(whole), device)
    return [uploaded[part] for part in parts]


def laid_out(columns: Sequence[Ints]) -> tuple[Ints, list[slice]]:
    """Return all columns in one array, and where each is: at 16 bytes, for others kernels are compiled anew."""
    starts = [0, *accumulate(len(column) + len(column) % 2 for column in columns)]
    parts = [slice(start, start + len(column)) for start, column in zip(starts, columns, strict=False)]
    whole = numpy.zeros(starts[-1], dtype=numpy.int64)
    for part, column in zip(parts, columns, strict=True):
        whole[part] = column
    return whole, parts
