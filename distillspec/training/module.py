"""The draft and its loss as one module, so that every parallel wrapper sees a single forward pass."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from distillspec.config import LossConfig
from distillspec.errors import ConfigError, RunError
from distillspec.losses import (
    ChunkedLoss,
    DenseTeacher,
    LossMix,
    NoTeacher,
    SignalTeacher,
    Teacher,
    TokenValues,
    chunked_loss,
    chunked_token_values,
    columns_of,
    select_tokens,
)
from distillspec.models import LanguageModel
from distillspec.sampling import NonFiniteLogits
from distillspec.types import OutputHead, TokenBatch


class DistillModule(nn.Module):
    """`forward` gives the mean loss of a batch's loss positions, or each one's loss without gradient.

    Numbers that are not finite make the loss NaN and are described in `problem`: a process that raised would
    leave the others waiting for its gradients. The head's weight is registered here directly: sharded training
    gathers a module's own parameters before its forward, and the chunked loss reads this weight outside the
    head's own forward.
    """

    def __init__(self, draft: LanguageModel, config: LossConfig) -> None:
        super().__init__()
        self.model = draft.model
        self.draft = draft
        self.mix = LossMix.parse(config.terms)
        self.config = config
        self.problem: str | None = None
        head = draft.model.get_output_embeddings()
        self.head_weight = head.weight
        self.head_bias = getattr(head, "bias", None)
        if draft.kept_ids is not None:
            self.register_buffer("kept_ids", draft.kept_ids.to(draft.device), persistent=False)
        else:
            self.kept_ids = None

    def forward(
        self,
        batch: TokenBatch,
        teacher: Teacher,
        weights: Tensor | None,
        normalizer: float,
        advantage: Tensor | None = None,
    ) -> ChunkedLoss | TokenValues | None:
        """Loss summed over `weights [N]` and divided by `normalizer`; differentiable in the draft.

        `advantage [N]` is for tvdpp; None takes it over this batch.

        Without weights: the first loss of the mix at each position, None where logits are not finite. Both are
        calls of this one method, since sharded weights are whole in here only.
        """
        try:
            if weights is None:
                return token_values(self.draft, self, batch, teacher)
            hidden = loss_hidden(self.draft, batch)
            return chunked_loss(
                hidden,
                self.head(),
                teacher,
                self.mix,
                weights=weights,
                normalizer=normalizer,
                chunk_tokens=self.config.chunk_tokens,
                kept_ids=self.kept_ids,
                labels=batch.labels,
                from_draft=batch.from_draft,
                writer_logprobs=batch.writer_logprobs,
                advantage=advantage,
                temperature=self.config.temperature,
            )
        except NonFiniteLogits as error:
            self.problem = str(error)
            return None if weights is None else ChunkedLoss(self._not_a_number(hidden), {})

    def _not_a_number(self, hidden: Tensor) -> Tensor:
        """NaN that depends on every parameter the loss depends on, so that backward reaches all of them."""
        reached = hidden.sum() + self.head_weight.sum()
        return (reached if self.head_bias is None else reached + self.head_bias.sum()) * math.nan

    def head(self) -> OutputHead:
        """The output head over this module's own (gathered) parameters."""
        rows = self.draft.width
        plain = self.draft.head
        bias = None if self.head_bias is None else self.head_bias[:rows]
        return OutputHead(self.head_weight[:rows], bias, plain.scale, plain.softcap)


def loss_hidden(model: LanguageModel, batch: TokenBatch) -> Tensor:
    """Final hidden states at the batch's loss positions, `[N, D]`."""
    hidden = model.hidden(batch.input_ids, batch.position_ids)
    return hidden.reshape(-1, hidden.shape[-1])[batch.loss_index]


@torch.no_grad()
def teacher_view(mix: LossMix, batch: TokenBatch, target: LanguageModel) -> Teacher:
    """The recorded signal where the batch has one, else a forward pass of the live target."""
    if not mix.needs_teacher:
        return NoTeacher()
    if batch.signal is not None:
        return SignalTeacher(batch.signal)
    return DenseTeacher(loss_hidden(target, batch), target.head)


@torch.no_grad()
def token_values(draft: LanguageModel, module: DistillModule, batch: TokenBatch, teacher: Teacher) -> TokenValues:
    """`draft`'s loss at each position by the first term of the module's mix, without gradient."""
    return chunked_token_values(
        loss_hidden(draft, batch),
        draft.head,
        teacher,
        module.mix.names[0],
        module.mix.terms[0].params,
        chunk_tokens=module.config.chunk_tokens,
        kept_ids=None if draft.kept_ids is None else draft.kept_ids.to(batch.labels.device),
        labels=batch.labels,
        from_draft=batch.from_draft,
        temperature=module.config.temperature,
    )


def defined_at(mix: LossMix, batch: TokenBatch, kept_ids: Tensor | None, width: int) -> Tensor:
    """Bool `[N]`: where any loss of the mix is defined; the others count in no mean."""
    if any(name not in ("ce", "tvdpp") for name in mix.names):
        return torch.ones_like(batch.from_draft)
    known = columns_of(batch.labels, kept_ids, width) >= 0
    return known if "ce" in mix.names else known & batch.from_draft


@torch.no_grad()
def token_weights(
    forward: Callable[..., Any],
    module: DistillModule,
    batch: TokenBatch,
    teacher: Teacher,
    reference: LanguageModel | None,
) -> Tensor:
    """One for each loss position to learn from, `[N]` float32; `forward` calls the (wrapped) module.

    With a reference draft only the `loss.select_fraction` of positions where the draft is furthest behind it
    count (AdaSPEC). Where the draft's logits are not finite all do: the loss will say so.
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
    try:
        theirs = token_values(reference, module, batch, teacher)
    except NonFiniteLogits as error:
        raise RunError(f"loss.reference={module.config.reference}: {error}") from error
    assert ours.values is not None
    assert theirs.values is not None
    return weights * select_tokens(ours.values, theirs.values, fraction, ours.valid)
