"""Layers as they are launched on a device, which can be recorded: in few launches where that works."""

from __future__ import annotations

from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.fused_layers import FusedLayers
from distillspec.serving.execution.flat_batch import FlatBatch


class Launches:
    """Runs the layers of one model.

    Attributes:
        fused: the layers in few launches, None where they are not used.
    """

    def __init__(self, model: LanguageModel, fused: FusedLayers | None) -> None:
        self.model, self.fused = model, fused

    def __call__(self, batch: FlatBatch, fed: Tensor | None = None, **named: int) -> Tensor:
        """Return last states `[N, D]`. For the arguments see `FlatView.hidden`."""
        if self.fused is not None and self.fused.takes(batch.view):
            return self.fused.hidden(batch.view, batch.tokens)
        return batch.view.hidden(self.model, batch.tokens, fed, **named)
