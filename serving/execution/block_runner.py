"""Runner of a draft that drafts a whole block in one pass."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.models.draft_steps import Unread
from distillspec.models.native_layers import NativeLayers
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.state_runner import StateRunner


class BlockRunner(StateRunner):
    """Reads the unread text and the masks behind it in one pass. What is carried on holds all positions.

    Keys and values of masks lie behind the text, and are written over. Masks that see each other in both directions are
    all read, by the one attention that lets tokens see later ones.
    """

    drafts_block = True

    def _native(self, batch: FlatBatch) -> NativeLayers | None:
        return None if self.model.sees_both_ways else super()._native(batch)

    def prepare(self, rows: Sequence[RowInput], count: int = 1) -> FlatBatch:
        """Return the input of one pass over `rows` with `count` − 1 masks behind each. Newest tokens are `wanted`."""
        if count == 1:
            return super().prepare(rows)
        return FlatBatch.of(self.cache, self._with_masks(rows, count), self.model.device, newest_alone=True)

    def masks(self, count: int) -> int:
        return int(self.model.most_positions or 1) - 1 if self.model.sees_both_ways else count - 1

    def unread(self, rows: Sequence[RowInput], count: int) -> Unread:
        return super().unread(self._with_masks(rows, count), count)

    def begin(self, batch: FlatBatch, count: int, *, recording: bool = False) -> Tensor:
        """Return the last states `[rows, count, D]` of the newest token and the masks."""
        hidden = self.eager(batch) if recording else self.hidden(batch)
        return hidden[batch.wanted[:, None] + torch.arange(count, device=hidden.device)]

    def follow(self, batch: FlatBatch, carried: Tensor, position: int, *, recording: bool = False) -> Tensor:
        return carried

    def predicted_acceptance(self, carried: Tensor) -> Tensor | None:
        return self.model.predicted_acceptance(carried) if self.model.has_confidence_head else None

    def logits(self, carried: Tensor, position: int = 0, newest: Tensor | None = None) -> Tensor:
        return super().logits(carried[:, position], position, newest)

    def _with_masks(self, rows: Sequence[RowInput], count: int) -> list[RowInput]:
        """Return rows with masks behind them. The states of these are wanted."""
        masks = [-1 - k for k in range(self.masks(count))]
        mutual = len(masks) if self.model.sees_both_ways else 0
        return [RowInput(row.slot, row.start, [*row.tokens, *masks], 1 + len(masks), mutual=mutual) for row in rows]
