"""Module of the draft and its loss, so that every parallel wrapper sees a single forward pass."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from distillspec.config import LossConfig
from distillspec.losses import (
    ChunkedLoss,
    DenseTeacher,
    HiddenTeacher,
    LossMix,
    NoTeacher,
    SignalTeacher,
    Teacher,
    TokenValues,
    chunked_loss,
    chunked_token_values,
)
from distillspec.models import LanguageModel
from distillspec.models.sequence_attention import reading_by_sequence
from distillspec.models.unrolling import unrolled
from distillspec.sampling import NonFiniteLogits
from distillspec.signals import HiddenSignal
from distillspec.training.unrolling import Unrolling
from distillspec.types import OutputHead, TokenBatch


class DistillModule(nn.Module):
    """Draft and loss: `forward` returns a batch's loss, or each position's loss without gradient.

    Logits that are not finite make the loss NaN and are described in `problem`. A process that raised would leave
    the others waiting for its gradients.

    The head's weight is registered here directly. Sharded training gathers a module's own parameters before its
    forward, and the chunked loss reads this weight outside the head's own forward.
    """

    def __init__(
        self,
        draft: LanguageModel,
        config: LossConfig,
        unrolling: Unrolling | None = None,
    ) -> None:
        super().__init__()
        unrolling = unrolling or Unrolling()
        if draft.most_positions is not None:  # each has weights, or a mask, of its own
            unrolling = replace(unrolling, steps=draft.most_positions, begins=0.0)
        self.unrolling, self._done = unrolling.checked(), 1.0
        self.model = draft.model
        self.draft = draft
        self.mix = LossMix.parse(config.terms)
        if draft.has_confidence_head and not self.mix.needs_teacher:
            draft.state_input.confidence.requires_grad_(False)  # type: ignore[union-attr]
        self.config = config
        self.problem: str | None = None
        head = draft.model.get_output_embeddings()
        self.head_weight = head.weight
        self.head_bias = getattr(head, "bias", None)
        if draft.kept_ids is not None:
            self.register_buffer("kept_ids", draft.kept_ids.to(draft.device), persistent=False)
        else:
            self.kept_ids = None

    @property
    def positions(self) -> int:
        """The most drafted positions that train at once."""
        return 1 if self.draft.state_input is None else self.unrolling.steps

    @property
    def own_metrics(self) -> list[str]:
        """Return the names of the metrics besides those of every loss: α of deeper positions."""
        return [f"alpha_{position}" for position in range(2, self.positions + 1)]

    @property
    def parameter_groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        """Return all parameters in groups, each with the share of the learning rate that it trains with."""
        return [(1.0, list(self.parameters()))]

    def begin_step(self, done: float) -> None:
        """Choose the drafted positions of the next step, when a share `done` of the run is over."""
        self._done = done

    def teacher(self, batch: TokenBatch, target: LanguageModel) -> Teacher:
        """Return what `forward` learns from: the batch's recorded signal, or else a pass of the live target."""
        return teacher_view(self.mix, batch, target, self.kept_ids)

    def forward(
        self,
        batch: TokenBatch,
        teacher: Teacher,
        weights: Tensor | None,
        normalizer: float,
        advantage: Tensor | None = None,
    ) -> ChunkedLoss | TokenValues | None:
        """Return the loss: the sum over `weights [N]` divided by `normalizer`, differentiable in the draft.

        Without weights, return the first loss of the mix at each position, or None where logits are not finite. Both
        are calls of this method because sharded weights are whole only inside it.

        Args:
            advantage: `[N]` float32 for tvdpp. None computes it over this batch.
        """
        try:
            if weights is None:
                return token_values(self.draft, self, batch, teacher)
            positions = min(self.positions, self.unrolling.positions(self._done))
            rows = self.unrolling.rows(batch) if positions > 1 else []
            hidden = batch_hidden(self.draft, batch, rows)
            first = self._loss(hidden[0], batch, teacher, weights, normalizer, advantage)
            shares = self.unrolling.loss_weights(positions)
            loss, metrics = shares[0] * first.loss, dict(first.metrics)
            for position, (index, deeper_hidden) in enumerate(zip(rows, hidden[1:], strict=True), start=2):
                chosen = None if advantage is None else advantage[index]
                deeper = self._loss(
                    deeper_hidden, batch.at(index), teacher.at(index), weights[index], normalizer, chosen
                )
                loss = loss + shares[position - 1] * deeper.loss
                share = metrics["weight"] / deeper.metrics["weight"]
                metrics[f"alpha_{position}"] = share * deeper.metrics.get("alpha", torch.tensor(math.nan))
            return ChunkedLoss(loss, metrics)
        except NonFiniteLogits as error:
            self.problem = str(error)
            return None if weights is None else ChunkedLoss(self._not_a_number(hidden), {})

    def _loss(
        self,
        hidden: Tensor,
        batch: TokenBatch,
        teacher: Teacher,
        weights: Tensor,
        normalizer: float,
        advantage: Tensor | None,
    ) -> ChunkedLoss:
        """Return the loss of one drafted position, `hidden [N, D]`."""
        result = chunked_loss(
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
        if not self.draft.has_confidence_head or result.acceptance is None:
            return result
        missed = self._confidence_loss(hidden, result.acceptance, weights) / normalizer
        return replace(result, loss=result.loss + missed)

    def _confidence_loss(self, hidden: Tensor, acceptance: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted cross entropy of predicted acceptance, summed. It teaches the confidence head alone."""
        logits = self.draft.state_input.confidence_logits(hidden.detach())  # type: ignore[union-attr, operator]
        missed = binary_cross_entropy_with_logits(logits, acceptance.clamp(0, 1), reduction="none")
        return (weights * missed).sum()

    def _not_a_number(self, hidden: Sequence[Tensor]) -> Tensor:
        """Return NaN that depends on every parameter of the loss, so that backward reaches all of them.

        Processes that share gradients would wait for those of the others.
        """
        reached = self.head_weight.sum() + torch.stack([each.sum() for each in hidden]).sum()
        if self.draft.has_confidence_head:
            reached = reached + self.draft.state_input.confidence_logits(hidden[0]).sum()  # type: ignore[union-attr, operator]
        return (reached if self.head_bias is None else reached + self.head_bias.sum()) * math.nan

    def head(self) -> OutputHead:
        """Return the output head over this module's own (gathered) parameters."""
        rows = self.draft.width
        plain = self.draft.head
        bias = None if self.head_bias is None else self.head_bias[:rows]
        return OutputHead(self.head_weight[:rows], bias, plain.scale, plain.softcap)


def loss_hidden(model: LanguageModel, batch: TokenBatch) -> Tensor:
    """Return final hidden states at the batch's loss positions, `[N, D]`."""
    return batch_hidden(model, batch, [])[0]


def batch_hidden(model: LanguageModel, batch: TokenBatch, deeper: Sequence[Tensor]) -> list[Tensor]:
    """Return final hidden states at the loss positions `[N, D]`, then at `deeper` rows of them, `[n_k, D]` each.

    These are the second, third, … drafted positions. Models that read tokens alone have one kind of position.
    """
    if model.state_input is None:
        with reading_by_sequence(model.model, batch.position_ids):
            hidden = model.hidden(batch.input_ids, batch.position_ids)
        return [hidden.reshape(-1, hidden.shape[-1])[batch.loss_index]]
    assert batch.states is not None, "the feed of a draft that reads states has them"
    wanted = [batch.loss_index, *(batch.loss_index[rows] for rows in deeper)]
    return unrolled(model, batch.input_ids, batch.position_ids, batch.states, wanted)


@torch.no_grad()
def teacher_view(mix: LossMix, batch: TokenBatch, target: LanguageModel, kept_ids: Tensor | None = None) -> Teacher:
    """Return the batch's recorded signal, or else a forward pass of the live target.

    Args:
        kept_ids: `[Vd]` int64 columns of a truncated draft.
    """
    if not mix.needs_teacher:
        return NoTeacher()
    if batch.signal is not None:
        if isinstance(batch.signal, HiddenSignal):
            return HiddenTeacher.of(batch.signal, target.head, kept_ids)
        return SignalTeacher(batch.signal)
    return DenseTeacher(loss_hidden(target, batch), target.head)


@torch.no_grad()
def token_values(draft: LanguageModel, module: DistillModule, batch: TokenBatch, teacher: Teacher) -> TokenValues:
    """Return `draft`'s loss at each position by the first term of the module's mix, without gradient."""
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
