"""TVD++'s advantages over a whole step: all its micro-batches, on all processes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.losses import Teacher, advantages
from distillspec.training.module import DistillModule
from distillspec.training.processes import process_count, totals
from distillspec.training.strategies import StepStrategy
from distillspec.types import TokenBatch


@torch.no_grad()
def batch_advantages(
    strategy: StepStrategy, module: DistillModule, batches: Sequence[TokenBatch], teachers: Sequence[Teacher]
) -> list[Tensor | None]:
    """Return advantages `[N]` float32 for each batch: rewards less their mean over the whole step.

    None leaves the advantages to the loss: for any loss but tvdpp, for a step of one batch on one process, and for a
    batch whose logits are not finite.
    """
    alone = len(batches) == 1 and process_count(strategy.accelerator) == 1
    if alone or not module.mix.needs_draft_samples:
        return [None] * len(batches)
    seen = [strategy.module(batch, teacher, None, 1.0) for batch, teacher in zip(batches, teachers, strict=True)]
    views = [None if values is None else values.labels for values in seen]
    masks = [None if v is None else v.valid & batch.from_draft for v, batch in zip(views, batches, strict=True)]
    ranked = [(v.reward, mask) for v, mask in zip(views, masks, strict=True) if v is not None and mask is not None]
    local_sums = [
        sum(float(mask.sum()) for _, mask in ranked),
        sum(float(reward[mask].sum()) for reward, mask in ranked),
    ]
    count, rewarded = totals(strategy.accelerator, local_sums)
    mean = rewarded / max(count, 1.0)
    return [
        None if view is None or mask is None else advantages(view.reward, mask, mean)
        for view, mask in zip(views, masks, strict=True)
    ]
