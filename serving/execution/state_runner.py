"""Runner of a draft that reads the target's states, out of the target's cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.draft_steps import StatesBefore
from distillspec.models.eagle import keeps_keys_alone
from distillspec.models.native_rows import NativeRows
from distillspec.models.slot_cache import SlotCache
from distillspec.models.state_input import StateInput
from distillspec.serving.base.transfer import between, to_device
from distillspec.serving.execution.background_call import BackgroundCall
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner


class StateRunner(ModelRunner):
    """Feeds each token the target's states of the token before it, or the draft's own where the target has none yet.

    Keys and values of tokens that followed its own states differ from those of text: such tokens are read again when
    they are text. Passes are not recorded alone, only in whole draft loops.

    Args:
        source: the target's cache, with the same slots. Its `features` are read at every pass.
        source_device: the device that it lies on, None: the draft's. From another one states are handed over.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: SlotCache,
        source: SlotCache,
        prepared: PreparedModel | None = None,
        source_device: torch.device | None = None,
    ) -> None:
        super().__init__(model, cache, prepared)
        self.source, self._source_device = source, source_device or model.device
        self._keeps_keys_alone = keeps_keys_alone(model)
        self._columns: tuple[tuple[int, ...], Tensor | None] = ((), None)  # for these states of the source

    def read(self, rows: Sequence[RowInput]) -> Tensor:
        """See `ModelRunner.read`. Of text whose states nobody wants, a single layer computes keys and values alone."""
        if not self._keeps_keys_alone or any(row.wanted for row in rows):
            return super().read(rows)
        BackgroundCall.give_way()
        batch = self.prepare(rows)
        self.passes += 1
        return batch.view.hidden(self.model, batch.tokens, self._before(batch), keys_alone=True)[:0]

    def eager(self, batch: FlatBatch, states: Tensor | None = None, position: int = 0) -> Tensor:
        fed = self._before(batch) if states is None else states
        named = {} if self.model.attends else {"drafted": position}
        return self.layers(batch, fed, **named)

    def follow(self, batch: FlatBatch, carried: Tensor, position: int, *, recording: bool = False) -> Tensor:
        if recording:
            return self.eager(batch, carried, position)
        self.passes += 1
        return self._timed(batch, carried, position)

    @property
    def hands_states(self) -> bool:
        near = self._source_device == self.model.device and type(self.source) is SlotCache
        return near and self._features().dtype == self.model.dtype

    def lacks_states(self, slot: int | None) -> bool:
        return slot in self.source.lacking

    def states_before(self, rows: NativeRows) -> StatesBefore:
        features, width = self._features(), self._input.target_width
        first, size = features.data_ptr(), features.itemsize
        by_slot, by_place = size * features.stride(0), size * features.stride(2)
        at = zip(*rows.tokens[:2].tolist(), strict=True)
        addresses = [first + slot * by_slot + (place - 1) * by_place if place else 0 for slot, place in at]
        return StatesBefore(numpy.array(addresses, dtype=numpy.int64), self._starts(width))

    @property
    def _input(self) -> StateInput:
        assert self.model.state_input is not None
        return self.model.state_input

    def _features(self) -> Tensor:
        """Return the target's states. They are there before it reads anything: a recorded loop keeps their address."""
        if (features := self.source.features) is not None:
            return features  # finding the model's head for the next line takes as long as a small product
        like = between(self.model.head.weight[:0], self._source_device)
        return self.source.kept_states(like, self._input.target_width)

    def _before(self, batch: FlatBatch) -> Tensor:
        """Return the fused states `[N, D]` of the tokens before each, zero at the start of a text."""
        places = batch.view.places
        states = self._handed_over(batch.view.slots, (places - 1).clamp(min=0))
        if (columns := self._draft_columns(self._input.target_width)) is not None:
            states = states.index_select(-1, columns)
        fused = self._input.fuse(states)
        # No product with a mask: what a slot held before may be NaN, and NaN times 0 is NaN.
        return torch.where((places > 0)[:, None], fused, 0)

    def _handed_over(self, slots: Tensor, places: Tensor) -> Tensor:
        """Return the target's states at places `[N]` of slots `[N]`, gathered where they lie, on the draft's device."""
        features = self._features()
        slots, places = (between(numbers, self._source_device) for numbers in (slots, places))
        rows, places = self.source.located(slots, places)
        return between(features[rows, 0, places], self.model.device)

    def _draft_columns(self, width: int) -> Tensor | None:
        """Return where the draft's states are among those that the target keeps, None if they are the same."""
        kept = self.source.state_ids
        if kept == self.model.state_ids:
            return None
        if self._columns[0] != kept:
            first = to_device(self._starts(width), self.model.device)
            self._columns = kept, (first[:, None] + torch.arange(width, device=self.model.device)).flatten()
        return self._columns[1]

    def _starts(self, width: int) -> list[int]:
        """Return where each state that the draft reads begins among those that the target keeps."""
        kept = self.source.state_ids
        return [kept.index(state) * width for state in self.model.state_ids]
