"""Losses straight from hidden states, a chunk of positions at a time: `[T, V]` never exists.

There is one chunked loss, not one a divergence: each chunk's logits go through the readable per-token
references under autograd, their gradient replaces them and goes through the output head at once.
The gradients of hidden states and head are finished in the forward pass; backward only scales them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from distillspec.losses.inputs import LossInputs
from distillspec.losses.mix import LossMix
from distillspec.losses.pairs import widened
from distillspec.losses.projection import Projection, ProjectionGradients
from distillspec.losses.registry import acceptance_of, per_token_loss
from distillspec.losses.sampled import LabelView, label_view
from distillspec.losses.selection import advantages
from distillspec.losses.teachers import Teacher, TeacherChunk
from distillspec.types import OutputHead

# Two sizes: a *chunk* of positions goes through the head at once (its logits exist in the head's dtype, and
# large products are fast ones), a *block* of it through the losses (their float32 temporaries exist: about 8
# of the draft's width and 4 of the target's a position).
_CHUNK_FLOATS = {"cpu": 2**23}
_BLOCK_FLOATS = {"cpu": 2**23}
_ACCELERATOR_FLOATS = 2**28


@dataclass(frozen=True)
class ChunkedLoss:
    """`loss` is a scalar to call backward on, once; `metrics` are detached scalars that add up over calls.

    With w the weights: `weight` Σw; `valid_weight` Σw where any loss of the mix is defined; `loss` Σw·mix;
    for each loss its name, Σw·value, and `<name>_weight`, Σw where it is defined; `outside` Σw·(target mass
    that the draft's vocabulary lacks); and, given a teacher, `alpha` Σw·α (see `acceptance_of` for what α
    means with a recorded signal). Divide by `weight` for means, a loss by its own weight.
    """

    loss: Tensor
    metrics: dict[str, Tensor]


@dataclass(frozen=True)
class TokenValues:
    """Per-token results without gradient, `[T]`; None where they were not asked for or cannot be known."""

    values: Tensor | None  # the named loss, nats
    valid: Tensor | None  # bool: where it is defined
    labels: LabelView | None  # both models at the labels


@dataclass(frozen=True)
class _Positions:
    """What is known about T positions besides hidden states; see `LossInputs` for the fields."""

    labels: Tensor | None = None
    from_draft: Tensor | None = None
    advantage: Tensor | None = None
    kept_ids: Tensor | None = None
    temperature: float = 1.0
    writer_logprobs: Tensor | None = None


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
    """Σ_t weights_t · mix_t / normalizer over T positions, differentiable in hidden states and draft head.

    `draft_hidden [T, D]` of any float dtype; `weights [T]` default to 1, 0 masks a position. `normalizer`
    defaults to Σ weights where any loss of the mix is defined (`ce` is not for labels that a truncated draft
    lacks, `tvdpp` not for tokens that the draft did not sample); an undefined loss adds 0. Pass the global
    Σ weights under gradient accumulation or several processes. `advantage [T]` for tvdpp; None takes a first
    pass for it, over these T. Losses are computed in float32; with grad mode off nothing is differentiated.
    Raises what `per_token_loss` raises, positions counted over T.
    """
    positions = _Positions(labels, from_draft, advantage, kept_ids, temperature, writer_logprobs)
    if mix.needs_draft_samples and advantage is None:
        positions = _with_advantage(draft_hidden, draft_head, teacher, positions, chunk_tokens)
    if weights is None:
        weights = torch.ones(draft_hidden.shape[0], device=draft_hidden.device)
    elif weights.shape != draft_hidden.shape[:1]:
        raise ValueError(f"weights {tuple(weights.shape)} must be one for each of {draft_hidden.shape[0]} rows")
    chunks = _Chunks(draft_head, teacher, positions, chunk_tokens)
    tally = _Tally(mix, weights.detach().float())
    loss = _ChunkedLossFunction.apply(
        draft_hidden, draft_head.weight, draft_head.bias, chunks, tally, normalizer, torch.is_grad_enabled()
    )
    return ChunkedLoss(loss, tally.sums)


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
    """The `loss` (with its `params`) at each of T positions and, given labels, both models' view of them.

    Feeds `select_tokens` (call it for draft and reference draft) and `advantages`. The label view also needs
    a live target or a `topk` signal; without it, `labels` is None in the result.
    """
    positions = _Positions(labels, from_draft, None, kept_ids, temperature)
    chunks = _Chunks(draft_head, teacher, positions, chunk_tokens)
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


def default_chunk_tokens(draft_width: int, target_width: int, device: torch.device) -> int:
    """Positions a chunk, so that its logits take about 32 MiB on CPU and 1 GiB on accelerators."""
    budget = _CHUNK_FLOATS.get(device.type, _ACCELERATOR_FLOATS)
    return max(16, budget // (draft_width + target_width))


def block_tokens(draft_width: int, target_width: int, device: torch.device) -> int:
    """Positions a block, so that the losses' temporaries take about 32 MiB on CPU and 1 GiB elsewhere."""
    budget = _BLOCK_FLOATS.get(device.type, _ACCELERATOR_FLOATS)
    return max(1, budget // (8 * draft_width + 4 * target_width))


@dataclass(frozen=True)
class _Block:
    """Positions `start` to `stop` of the batch, inside a chunk that begins at `chunk_start`."""

    positions: _Positions
    teacher_chunk: TeacherChunk
    chunk_start: int
    start: int
    stop: int

    def of(self, chunk: Tensor) -> Tensor:
        """The block's rows of a tensor that holds the whole chunk."""
        return chunk[self.start - self.chunk_start : self.stop - self.chunk_start]

    def inputs(self, draft_logits: Tensor) -> LossInputs:
        at = self.positions
        logits, signal = self.teacher_chunk.rows(self.start - self.chunk_start, self.stop - self.chunk_start)
        return LossInputs(
            draft_logits,
            target_logits=logits,
            signal=signal,
            kept_ids=at.kept_ids,
            labels=_rows(at.labels, self.start, self.stop),
            from_draft=_rows(at.from_draft, self.start, self.stop),
            advantage=_rows(at.advantage, self.start, self.stop),
            temperature=at.temperature,
            writer_logprobs=_rows(at.writer_logprobs, self.start, self.stop),
            first_position=self.start,
        )


@dataclass(frozen=True)
class _Chunks:
    """Where chunks and blocks begin and end, and what the losses are told about each block."""

    head: OutputHead
    teacher: Teacher
    positions: _Positions
    chunk_tokens: int | None

    def bounds(self, hidden: Tensor) -> Iterator[tuple[int, int]]:
        self._check_rows(hidden.shape[0])
        size = self.chunk_tokens or default_chunk_tokens(*self._widths(), hidden.device)
        for start in range(0, hidden.shape[0], size):
            yield start, min(start + size, hidden.shape[0])

    def blocks(self, start: int, stop: int) -> Iterator[_Block]:
        teacher_chunk = self.teacher.chunk(start, stop)
        size = block_tokens(*self._widths(), self.head.weight.device)
        for first in range(start, stop, size):
            yield _Block(self.positions, teacher_chunk, start, first, min(first + size, stop))

    def _widths(self) -> tuple[int, int]:
        return self.head.weight.shape[0], self.teacher.logit_width

    def _check_rows(self, rows: int) -> None:
        """A chunk would not notice rows too many, and would compare one token with another."""
        at = self.positions
        counts = {"the teacher": self.teacher.positions}
        for name, values in (
            ("labels", at.labels),
            ("from_draft", at.from_draft),
            ("advantage", at.advantage),
            ("writer_logprobs", at.writer_logprobs),
        ):
            counts[name] = None if values is None else values.shape[0]
        for name, count in counts.items():
            if count is not None and count != rows:
                raise ValueError(f"{name} has {count} positions, draft_hidden {rows}")


@dataclass
class _Tally:
    """Runs the mix on one chunk after another and adds up its weighted sums."""

    mix: LossMix
    weights: Tensor  # [T] float32
    sums: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        zero = torch.zeros((), device=self.weights.device)
        names = ["weight", "valid_weight", "loss", "outside"]
        names += [name + suffix for name in self.mix.names for suffix in ("", "_weight")]
        self.sums.update(dict.fromkeys(names, zero))

    def add(self, inputs: LossInputs, start: int, stop: int) -> Tensor:
        """Σ weights · mix over the chunk, differentiable in its draft logits."""
        weights = self.weights[start:stop]
        mixed, outside = torch.zeros_like(weights), None
        defined = torch.zeros_like(weights, dtype=torch.bool)
        for term in self.mix.terms:
            result = per_token_loss(term.name, inputs, **term.params)
            mixed = mixed + term.weight * result.values
            defined = defined | result.valid
            if outside is None or term.name != "ce":  # ce knows one token's, the others the distribution's
                outside = result.outside
            self._sum(term.name, weights * result.values)
            self._sum(f"{term.name}_weight", weights * result.valid)
        total = (weights * mixed).sum()
        alpha = acceptance_of(inputs)
        if alpha is not None:
            self._sum("alpha", weights * alpha)
        assert outside is not None, "a mix has at least one term"
        self._sum("outside", weights * outside)
        self._sum("weight", weights)
        self._sum("valid_weight", weights * defined)
        self._sum("loss", total)
        return total

    def denominator(self, normalizer: Tensor | float | None) -> Tensor:
        if normalizer is None:
            normalizer = self.sums["valid_weight"]
        given = torch.as_tensor(normalizer, dtype=torch.float32, device=self.weights.device)
        return given.clamp(min=torch.finfo(torch.float32).tiny)

    def _sum(self, name: str, values: Tensor) -> None:
        self.sums[name] = self.sums.get(name, 0) + values.detach().sum()


class _ChunkedLossFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunks: _Chunks,
        tally: _Tally,
        normalizer: Tensor | float | None,
        grad_enabled: bool,
    ) -> Tensor:
        projection = Projection.of(chunks.head)
        needed = tuple(grad_enabled and wanted for wanted in ctx.needs_input_grad[:3])
        gradients = ProjectionGradients(hidden, projection, needed)
        for start, stop in chunks.bounds(hidden):
            rows = hidden[start:stop]
            linear = projection.linear(rows)
            for block in chunks.blocks(start, stop):
                leaf = widened(block.of(linear)).detach().requires_grad_(any(needed))
                with torch.set_grad_enabled(any(needed)):
                    total = tally.add(block.inputs(projection.logits(leaf)), block.start, block.stop)
                if any(needed):  # the gradient takes the place of the logits it belongs to
                    block.of(linear).copy_(torch.autograd.grad(total, leaf)[0])
            if any(needed):
                gradients.add(start, rows, linear)
        ctx.gradients, ctx.denominator = gradients, tally.denominator(normalizer)
        return tally.sums["loss"] / ctx.denominator

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("chunked_loss keeps its gradients for one backward pass; compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None  # scaled in place: a head's gradient is large
        return (*gradients.scaled(grad_output / ctx.denominator), None, None, None, None)


def _with_advantage(
    hidden: Tensor, head: OutputHead, teacher: Teacher, positions: _Positions, chunk_tokens: int | None
) -> _Positions:
    """Fill in TVD++'s advantages, which need the rewards of the whole batch first."""
    if positions.labels is None or positions.from_draft is None:
        return positions  # per_token_loss says what is missing
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


def _rows(values: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if values is None else values[start:stop]


def _joined(views: list[LabelView]) -> LabelView:
    return LabelView(*(torch.cat([getattr(view, name) for view in views]) for name in LabelView.__dataclass_fields__))
