"""Check of a model over the slot cache: every layer's attention, on its input in the model's own pass.

Whole passes cannot be compared, for rounding grows with every layer, in bfloat16 up to half of the hidden state. The
attention of one layer differs by its own rounding only. How much that is, is measured by perturbing queries, keys and
values by one unit in the last place.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from distillspec.models import LanguageModel
from distillspec.models.slot_attention import slot_attention
from distillspec.models.slot_cache import SlotCache, SlotView

OVER_SLOTS, RECORDING = "distillspec_check_slots", "distillspec_check_own_"  # names of attentions in transformers
LIMIT = 4.0  # times the rounding of one attention. Measured: correct ones reach .3, a scale off by a fifth 6
COARSEST = 2.0**-10  # the smallest unit assumed: TF32 and sums in another order round like it
ELSEWHERE = 0.25  # largest error of a hidden state when only the parts without attention are computed again


@dataclass(frozen=True)
class _Call:
    """Inputs and output of one attention in the model's own pass."""

    query: Tensor  # [B, heads, L, d]
    key: Tensor
    value: Tensor
    output: Tensor  # [B, L, heads, d]


@dataclass
class AttentionCheck:
    """Reads tokens with the model's own attention, then over slots in two pieces, and compares each attention.

    Each layer's attention over slots gets the recorded input, and the recorded output is passed on, so that errors do
    not add up.

    Attributes:
        tokens: `[B, L]`.
        counts: `[B]` tokens of each row, above `first`. The others are padding.
        first: tokens of the first piece.
    """

    model: LanguageModel
    tokens: Tensor
    counts: Tensor
    first: int
    calls: list[_Call] = field(default_factory=list)
    problem: str | None = None

    @torch.inference_mode()
    def run(self) -> str | None:
        """Return a description of the first problem, None if there is none.

        Raises:
            Exception: of any kind, by a model that cannot use slots.
        """
        hidden = self._own_pass()
        if not self.calls:
            return "it does not call its attention through transformers' attention interface"
        shape = (len(self.tokens), 64)
        self._caches = SlotCache(*shape), SlotCache(*shape)
        self._generator = torch.Generator(self.tokens.device).manual_seed(0)
        self._slots_pass(hidden, 0, self.first)
        self._slots_pass(hidden, self.first, self.tokens.shape[1])
        return self.problem

    def _own_pass(self) -> Tensor:
        positions = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.tokens)
        with _attention_in(self.model.model, _own_implementation(self.model.model)):
            return self.model.hidden(self.tokens, positions, slot_check=self)

    def _slots_pass(self, hidden: Tensor, start: int, end: int) -> None:
        starts = torch.full_like(self.counts, start)
        view = SlotView.append(
            self._caches[0], range(len(self.counts)), starts, self.counts.clamp(max=end) - start, end, end - start
        )
        self._piece, self._next = slice(start, end), 0
        self._real = view.places < view.cache.max_len
        with _attention_in(self.model.model, OVER_SLOTS):
            got = self.model.hidden(self.tokens[:, start:end], view.positions, slot_view=view, slot_check=self)
        if self._next != len(self.calls):
            self._note(f"{self._next} attentions run where {len(self.calls)} should")
        error, size = _norm(got - hidden[:, start:end]), _norm(hidden[:, start:end])
        typical = float((error / size)[self._real].median())
        if typical > ELSEWHERE:
            self._note(f"off by {typical:.0%} outside its attention")

    def record(self, attention: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Run one attention of the model's own pass and keep its inputs and output."""
        output = attention(query, key, value)
        self.calls.append(_Call(query, key, value, output))
        return output

    def compare(self, attention: Any, query: Tensor, key: Tensor, view: SlotView) -> Tensor:
        """Compare the attention over slots with the recorded one, and return the recorded output of this piece."""
        call, piece = self.calls[self._next], self._piece
        inputs = [tensor[:, :, piece] for tensor in (call.query, call.key, call.value)]
        unit = max(torch.finfo(query.dtype).eps, COARSEST)
        if self._next == 0:  # only the embedding came before, so any difference is one of positions
            for given, wanted in ((query, inputs[0]), (key, inputs[1])):
                self._check(given.transpose(1, 2), wanted.transpose(1, 2), 0.0, unit)
        wanted = call.output[:, piece]
        actual = attention(*inputs, view)
        perturbed = [_perturbed(tensor, unit, self._generator) for tensor in inputs]
        noise = _norm(attention(*perturbed, replace(view, cache=self._caches[1], _kept={})) - actual)
        self._check(actual, wanted, noise, unit)
        self._next += 1
        return wanted

    def _check(self, actual: Tensor, wanted: Tensor, noise: Tensor | float, unit: float) -> None:
        """Compare `[B, q, heads, d]` by head and position. NaN in the model's own pass is skipped."""
        error, size = _norm(actual - wanted), _norm(wanted)
        wrong = ~(error <= LIMIT * (noise + unit * size)) & size.isfinite() & self._real[..., None]
        if bool(wrong.any()):
            off = float((error / size)[wrong].nan_to_num(torch.inf).max())
            self._note(f"off by {off:.0%} in attention {self._next + 1} of {len(self.calls)}")

    def _note(self, problem: str) -> None:
        self.problem = self.problem or problem


def _norm(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32)).norm(dim=-1)


def _perturbed(x: Tensor, unit: float, generator: torch.Generator) -> Tensor:
    """Change every element up or down by a share `unit` of it."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    signs = torch.randint(0, 2, x.shape, generator=generator, device=x.device) * 2 - 1
    return (wide + wide * unit * signs).to(x.dtype)


@contextmanager
def _attention_in(model: PreTrainedModel, name: str) -> Iterator[None]:
    before = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def _own_implementation(model: PreTrainedModel) -> str:
    """Register a recording version of the model's own attention and return its name.

    Models with a kernel of their own are recorded with sdpa, or eager.
    """
    name = model.config._attn_implementation
    if name not in ("sdpa", "eager"):
        name = "sdpa" if model._supports_sdpa else "eager"
    AttentionInterface.register(RECORDING + name, partial(_recorded, name))
    AttentionMaskInterface.register(RECORDING + name, AttentionMaskInterface()[name])
    return RECORDING + name


def _recorded(
    name: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_check: AttentionCheck,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    modeling = sys.modules[type(module).__module__]
    known = getattr(modeling, "ALL_ATTENTION_FUNCTIONS", AttentionInterface())
    attention = known.get_interface(name, getattr(modeling, "eager_attention_forward", None))

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return attention(module, query, key, value, attention_mask, **kwargs)[0]

    return slot_check.record(output, query, key, value), None


def _compared(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    slot_view: SlotView,
    slot_check: AttentionCheck,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    def output(query: Tensor, key: Tensor, value: Tensor, view: SlotView) -> Tensor:
        return slot_attention(module, query, key, value, None, slot_view=view, **kwargs)[0]

    return slot_check.compare(output, query, key, slot_view), None


AttentionInterface.register(OVER_SLOTS, _compared)
