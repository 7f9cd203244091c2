"""Runner of a draft that reads the target's states, out of the target's cache."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.runner import ModelRunner


class StateRunner(ModelRunner):
    """Feeds each token the target's states of the token before it, or the draft's own where the target has none yet.

    What it keeps of tokens that followed its own states differs from what it keeps of text: they are read again when
    they are text. Passes are not recorded alone, only in whole draft loops.

    Args:
        source: the target's cache, with the same slots. Its `features` are read at every pass.
    """

    def __init__(
        self,
        model: LanguageModel,
        cache: SlotCache,
        source: SlotCache,
        prepared: PreparedModel | None = None,
    ) -> None:
        super().__init__(model, cache, prepared)
        self.source = source

    def eager(self, batch: FlatBatch, states: Tensor | None = None) -> Tensor:
        return batch.view.hidden(self.model, batch.tokens, self._before(batch) if states is None else states)

    def follow(self, batch: FlatBatch, states: Tensor) -> Tensor:
        self.passes += 1
        return self.eager(batch, states)

    def _before(self, batch: FlatBatch) -> Tensor:
        """Return the fused states `[N, D]` of the tokens before each, zero at the start of a text."""
        assert self.model.state_input is not None
        places, slots = batch.view.places, batch.view.slots
        features = self.source.features
        if features is None:  # the target has read nothing yet
            return torch.zeros(len(places), self.model.state_input.fc.out_features, device=self.model.device)
        rows, before = self.source.located(slots, (places - 1).clamp(min=0))
        states = features[rows, 0, before]
        if (at := self._columns()) is not None:
            states = states.unflatten(-1, (len(self.source.state_ids), -1))[:, at].flatten(1)
        fused = self.model.state_input.fuse(states)
        # No product with a mask: what a slot held before may be NaN, and NaN times 0 is NaN.
        return torch.where((places > 0)[:, None], fused, 0)

    def _columns(self) -> Sequence[int] | None:
        """Return where the draft's states are among those that the target keeps, None if they are the same."""
        kept = self.source.state_ids
        if kept == self.model.state_ids:
            return None
        return [kept.index(state) for state in self.model.state_ids]
