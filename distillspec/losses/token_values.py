"""Each token's loss and both models' view of its label, without gradient."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from distillspec.losses.chunks import Chunks, Positions
from distillspec.losses.pairs import widened
from distillspec.losses.projection import Projection
from distillspec.losses.registry import per_token_loss
from distillspec.losses.sampled import LabelView, label_view
from distillspec.losses.teachers import Teacher
from distillspec.types import OutputHead


@dataclass(frozen=True)
class TokenValues:
    """Per-token results `[T]` without gradient. None for those not requested or not known."""

    values: Tensor | None  # the named loss, nats
    valid: Tensor | None  # bool: where it is defined
    labels: LabelView | None  # both models at the labels


@torch.no_grad()
def chunked_token_values(
    draft_hidden: Tensor,
    draft_head: OutputHead,
    teacher: Teacher,
    loss: str | None = None,
    params: Mapping[str, Any] | None = None,
    *,
    labels: Tensor | None = None,
    from_draft: Tensor | None = None,
    kept_ids: Tensor | None = None,
    temperature: float = 1.0,
    chunk_tokens: int | None = None,
) -> TokenValues:
    """Return `loss` (with its `params`) at each of T positions and, given labels, both models' view of them.

    The values feed `select_tokens` (one call for the draft, one for the reference draft) and `advantages`. The label
    view needs a live target or a `topk` signal too. Without it `labels` is None in the result.

    Args:
        draft_hidden: `[T, D]` of any float dtype.

    Raises:
        NonFiniteLogits: a position's logits hold NaN or +inf.
        ValueError: an input has not T positions.
    """
    positions = Positions(labels, from_draft, None, kept_ids, temperature)
    chunks = Chunks(draft_head, teacher, positions, chunk_tokens)
    projection = Projection.of(draft_head)
    results, views = [], []
    for start, stop in chunks.bounds(draft_hidden):
        linear = projection.linear(draft_hidden[start:stop])
        for block in chunks.blocks(start, stop):
            inputs = block.inputs(projection.logits(widened(block.of(linear))))
            inputs.require_finite(loss or "label log-probabilities")
            if loss is not None:
                results.append(per_token_loss(loss, inputs, **(params or {})))
            if labels is not None and inputs.has_pair:
                views.append(label_view(inputs))
    return TokenValues(
        values=torch.cat([result.values for result in results]) if results else None,
        valid=torch.cat([result.valid for result in results]) if results else None,
        labels=_joined(views) if views else None,
    )


def _joined(views: list[LabelView]) -> LabelView:
    return LabelView(*(torch.cat([getattr(view, name) for view in views]) for name in LabelView.__dataclass_fields__))
