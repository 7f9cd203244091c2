"""Weights of loss positions: where a loss is defined, and which positions to learn from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distillspec.errors import ConfigError, RunError
from distillspec.losses import LossMix, Teacher, columns_of, select_tokens
from distillspec.models import LanguageModel
from distillspec.sampling import NonFiniteLogits
from distillspec.signals import HiddenSignal
from distillspec.training.module import DistillModule, teacher_view, token_values
from distillspec.training.unrolling import goes_on
from distillspec.types import TokenBatch


def defined_at(mix: LossMix, batch: TokenBatch, kept_ids: Tensor | None, width: int) -> Tensor:
    """Return bool `[N]`: True where any loss of the mix is defined. Other positions count in no mean."""
    if any(name not in ("ce", "tvdpp") for name in mix.names):
        return torch.ones_like(batch.from_draft)
    known = columns_of(batch.labels, kept_ids, width) >= 0
    return known if "ce" in mix.names else known & batch.from_draft


def shared_by_sequence(batch: TokenBatch) -> Tensor:
    """Return weights of loss positions, `[N]` float32 of mean 1, which sum up alike over each response of the batch."""
    response = torch.cumsum(~goes_on(batch), 0) - 1
    lengths = torch.bincount(response).float()
    return (lengths.mean() / lengths)[response]


@torch.no_grad()
def token_weights(
    forward: Callable[..., Any],
    module: DistillModule,
    batch: TokenBatch,
    teacher: Teacher,
    target: LanguageModel,
    reference: LanguageModel | None,
) -> Tensor:
    """Return each loss position's weight, `[N]` float32 of 0 and 1.

    With a reference draft only the `loss.select_fraction` of positions where the draft is furthest behind it count
    (AdaSPEC). All count where the draft's logits are not finite: the loss reports that.

    Args:
        forward: calls the (wrapped) module.
        teacher: the target as the draft sees it.

    Raises:
        ConfigError: positions are to be selected, and there is no reference draft.
        RunError: the reference draft's logits are not finite.
    """
    weights = torch.ones(batch.response_tokens, device=batch.labels.device)
    fraction = module.config.select_fraction
    if fraction is None:
        return weights
    if reference is None:
        raise ConfigError("loss.select_fraction needs loss.reference=FOLDER (a draft to compare with)")
    ours = forward(batch, teacher, None, 1.0)
    if ours is None:
        return weights
    if isinstance(batch.signal, HiddenSignal):  # the draft's teacher has the draft's columns alone
        kept_ids = None if reference.kept_ids is None else reference.kept_ids.to(batch.labels.device)
        teacher = teacher_view(module.mix, batch, target, kept_ids)
    try:
        theirs = token_values(reference, module, batch, teacher)
    except NonFiniteLogits as error:
        raise RunError(f"loss.reference={module.config.reference}: {error}") from error
    assert ours.values is not None
    assert theirs.values is not None
    return weights * select_tokens(ours.values, theirs.values, fraction, ours.valid)
