"""Losses straight from hidden states, a chunk of positions at a time.

There is one chunked loss for all divergences. Each block's logits go through the readable per-token references under
autograd. Their gradient takes the place of the logits and goes through the output head at once. So the gradients of
hidden states and head are complete after the forward pass, and backward only scales them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distillspec.losses.chunks import Chunks, Positions
from distillspec.losses.metric_sums import MetricSums
from distillspec.losses.mix import LossMix
from distillspec.losses.pairs import widened
from distillspec.losses.projection import Projection, ProjectionGradients
from distillspec.losses.sampled import advantages
from distillspec.losses.teachers import Teacher
from distillspec.losses.token_values import chunked_token_values
from distillspec.types import OutputHead


@dataclass(frozen=True)
class ChunkedLoss:
    """Scalar `loss` to call backward on, once, and `metrics`: detached scalars that add up over calls.

    With w the weights, the metrics are

    * `weight`: Σw. Divide by it for means.
    * `valid_weight`: Σw where any loss of the mix is defined.
    * `loss`: Σw·mix, in nats.
    * the name of each loss: Σw·value, and `<name>_weight`: Σw where it is defined, to divide it by.
    * `outside`: Σw·(target probability that the draft's vocabulary lacks).
    * `alpha`, given a teacher: Σw·α. `acceptance_of` says what α means with a recorded signal.

    `acceptance` is α at each position, `[T]` float32, None without a teacher.
    """

    loss: Tensor
    metrics: dict[str, Tensor]
    acceptance: Tensor | None = None


def chunked_loss(
    draft_hidden: Tensor,
    draft_head: OutputHead,
    teacher: Teacher,
    mix: LossMix,
    *,
    weights: Tensor | None = None,
    normalizer: Tensor | float | None = None,
    labels: Tensor | None = None,
    from_draft: Tensor | None = None,
    advantage: Tensor | None = None,
    kept_ids: Tensor | None = None,
    temperature: float = 1.0,
    writer_logprobs: Tensor | None = None,
    chunk_tokens: int | None = None,
) -> ChunkedLoss:
    """Return Σ_t weights_t · mix_t / normalizer over T positions, differentiable in hidden states and draft head.

    Losses are computed in float32. An undefined loss adds 0: `ce` is undefined for labels that a truncated draft lacks,
    `tvdpp` for tokens that the draft did not sample. With grad mode off nothing is differentiated.

    Args:
        draft_hidden: `[T, D]` of any float dtype.
        weights: `[T]`, 1 by default. 0 masks a position.
        normalizer: by default Σ weights where any loss of the mix is defined. Pass the global sum under gradient
            accumulation or several processes.
        advantage: `[T]` for tvdpp. None takes a first pass for it, over these T.
        chunk_tokens: positions whose logits exist at one time. None: by memory.

    Raises:
        NonFiniteLogits: logits hold NaN or +inf. The message names the position among the T.
        ConfigError: an input that a loss of the mix needs is missing.
        ValueError: shapes do not fit.
    """
    positions = Positions(labels, from_draft, advantage, kept_ids, temperature, writer_logprobs)
    if mix.needs_draft_samples and advantage is None:
        positions = _with_advantage(draft_hidden, draft_head, teacher, positions, chunk_tokens)
    if weights is None:
        weights = torch.ones(draft_hidden.shape[0], device=draft_hidden.device)
    elif weights.shape != draft_hidden.shape[:1]:
        raise ValueError(f"weights {tuple(weights.shape)} must be one for each of {draft_hidden.shape[0]} rows")
    chunks = Chunks(draft_head, teacher, positions, chunk_tokens)
    sums = MetricSums(mix, weights.detach().float())
    loss = _ChunkedLossFunction.apply(
        draft_hidden, draft_head.weight, draft_head.bias, chunks, sums, normalizer, torch.is_grad_enabled()
    )
    return ChunkedLoss(loss, sums.values, torch.cat(sums.accepted) if sums.accepted else None)


class _ChunkedLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunks: Chunks,
        sums: MetricSums,
        normalizer: Tensor | float | None,
        grad_enabled: bool,
    ) -> Tensor:
        projection = Projection.of(chunks.head)
        needed = tuple(grad_enabled and needs for needs in ctx.needs_input_grad[:3])
        gradients = ProjectionGradients(hidden, projection, needed)
        for start, stop in chunks.bounds(hidden):
            rows = hidden[start:stop]
            linear = projection.linear(rows)
            for block in chunks.blocks(start, stop):
                leaf = widened(block.of(linear)).detach().requires_grad_(any(needed))
                with torch.set_grad_enabled(any(needed)):
                    total = sums.add(block.inputs(projection.logits(leaf)), block.start, block.stop)
                if any(needed):  # the gradient takes the place of the logits it belongs to
                    block.of(linear).copy_(torch.autograd.grad(total, leaf)[0])
            if any(needed):
                gradients.add(start, rows, linear)
        ctx.gradients, ctx.denominator = gradients, sums.denominator(normalizer)
        return sums.values["loss"] / ctx.denominator

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("chunked_loss keeps its gradients for one backward pass; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place, since a head's gradient is large
        return (*gradients.scaled(grad_output / ctx.denominator), None, None, None, None)


def _with_advantage(
    hidden: Tensor, head: OutputHead, teacher: Teacher, positions: Positions, chunk_tokens: int | None
) -> Positions:
    """Add TVD++'s advantages, which need the rewards of the whole batch first."""
    if positions.labels is None or positions.from_draft is None:
        return positions  # per_token_loss raises for what is missing
    tokens = chunked_token_values(
        hidden,
        head,
        teacher,
        labels=positions.labels,
        kept_ids=positions.kept_ids,
        temperature=positions.temperature,
        chunk_tokens=chunk_tokens,
    )
    if tokens.labels is None:
        return positions
    advantage = advantages(tokens.labels.reward, tokens.labels.valid & positions.from_draft)
    return replace(positions, advantage=advantage)
