"""Input buffers of recorded passes of one shape, filled by one upload a pass."""

from __future__ import annotations

import numpy
import torch
from torch import Tensor

from distillspec.models.flat_view import FlatView, RowGroup
from distillspec.models.slot_cache import SlotCache, SlotView
from distillspec.serving.base.transfer import upload_into
from distillspec.serving.execution.flat_batch import FlatBatch, laid_out, upload_table
from distillspec.serving.execution.host_batch import HostBatch
from distillspec.serving.execution.recorded_shapes import PassShape
from distillspec.types import Ints


class PassInputs:
    """Buffers, parts of one tensor. Rows are the cache's slots. What only pads is written to the cache's spare place.

    Attributes:
        tokens: `[1, N]` int64.
        last: `[rows]` int64, the newest token of each row in the batch.
        ends: `[rows]` int64, the place behind it, `cache.max_len` in rows that only pad.
    """

    def __init__(self, cache: SlotCache, shape: PassShape, device: torch.device) -> None:
        self.cache, self.shape = cache, shape
        self._device = device
        tokens, rows, rectangle = shape.tokens, shape.rows, shape.rows * shape.width
        spare = cache.max_len
        # Sizes, and what each part holds where nothing is loaded.
        sizes = {
            "tokens": (tokens, 0),
            "slots": (tokens, 0),
            "places": (tokens, spare),
            "back": (tokens, 0),
            "queries": (rectangle, 0),
            "rectangle": (rectangle, spare),
            "last": (rows, 0),
            "ends": (rows, spare),
            "order": (rows, 0),
        }
        self._blank, self._parts = laid_out([numpy.full(size, value) for size, value in sizes.values()])
        self._buffer = torch.from_numpy(self._blank).to(device, copy=True)
        named = dict(zip(sizes, [self._buffer[part] for part in self._parts], strict=True))
        self.tokens = named["tokens"][None]
        self.last = named["last"]
        self.ends = named["ends"]
        self._slots = named["slots"]
        self._places = named["places"]
        self._queries = named["queries"]
        self._back = named["back"]
        self._rectangle = named["rectangle"].view(rows, -1)
        self._order = named["order"]
        self._rows = torch.arange(rows, device=device)

    def batch(self) -> FlatBatch:
        """Return the batch of a pass over the buffers, which wants each row's newest token. Make it while recording."""
        last, shape = self.cache.max_len - 1, self.shape
        positions, rectangle = self._places.clamp(max=last), self._rectangle
        rows = SlotView(self.cache, rectangle, rectangle.clamp(max=last), shape.reach, self._rows, first=0)
        group = RowGroup(rows, 0, shape.tokens, self._queries, self._back)
        view = FlatView(self.cache, self._slots, self._places, positions[None], (group,))
        return FlatBatch.on_device(self.tokens, view, self.last)

    def load(self, batch: HostBatch) -> Tensor:
        """Upload the input of a pass. Return the slots of its rows, `[B]` int64, until the next load."""
        upload_table(self.cache, self._device)
        upload_into(self._buffer, torch.from_numpy(self._filled(batch)))
        return self._order[: len(batch.rows)]

    def _filled(self, batch: HostBatch) -> Ints:
        filled, count, width = self._blank.copy(), len(batch), self.shape.width
        tokens, slots, places, back, queries, rectangle, last, ends, order = [filled[part] for part in self._parts]
        tokens[:count], places[:count] = batch.tokens, batch.places
        slots[:count] = batch.slots.repeat(batch.counts)
        last[batch.slots], ends[batch.slots] = batch.newest, batch.ends
        order[: len(batch.rows)] = batch.slots
        for group in batch.groups:
            shape, first = (len(group.rows), group.width), group.rows[0].slot
            cells_of_group = (slice(first, first + len(group.rows)), slice(group.width))
            cell_tokens, cell_places, cells = group.rectangle
            queries.reshape(-1, width)[cells_of_group] = cell_tokens.reshape(shape) + group.start
            rectangle.reshape(-1, width)[cells_of_group] = cell_places.reshape(shape)
            row, column = numpy.divmod(cells, group.width)
            back[group.start : group.start + group.count] = (row + first) * width + column
        return filled
