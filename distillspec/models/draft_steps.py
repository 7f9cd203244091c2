"""Steps of a draft loop on CPUs, all in one call of C++ (`draft_steps.h`)."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import addressof
from typing import NamedTuple

import torch
from torch import Tensor, nn

from distillspec.models.few_tokens import FewTokens
from distillspec.models.language_model import LanguageModel
from distillspec.models.slot_cache import SlotCache
from distillspec.models.state_input import ADDED, EPS, JOINED, DeferredNorm
from distillspec.native.vector_kernel import numbers, vector_kernel


class Chance(NamedTuple):
    """Numbers that draws of N rows follow, over S steps with at most W siblings.

    temperatures: `[N]` float32, above 0 where a row draws.
    greedy: `[N]` bool, None if no row is.
    uniforms: `[N, S, W]` float64 in [0, 1).
    """

    temperatures: Tensor
    greedy: Tensor | None
    uniforms: Tensor


class Stepped(NamedTuple):
    """Chosen tokens."""

    ids: Tensor  # [N, Σ widths] int64, absolute, −1 where there is no further one
    finite: Tensor  # [N, S] bool: False where logits were NaN, or left nothing
    probs: Tensor | None  # [N, S, width] float32 that tokens were drawn from, None without `Chance`


class DraftSteps:
    """Draft steps of one model: read the newest token, and choose the next one and its siblings."""

    def __init__(self, model: LanguageModel, few: FewTokens) -> None:
        self.model, self.few = model, few
        final = model.decoder.norm
        norm = final.norm if isinstance(final, DeferredNorm) else final
        self._norm = norm.weight.detach().float().contiguous()  # type: ignore[union-attr, operator]
        kernel, head = vector_kernel(), model.head.weight.detach()
        self._head, self._padded = kernel.packed(head, few.kind.weights), kernel.rows(len(head))
        way = None if model.state_input is None else model.state_input.way
        self._joined = way == JOINED
        self._projection = None
        if way == ADDED:
            projection = model.state_input.projection  # type: ignore[union-attr]
            self._projection = kernel.packed(projection.weight.detach(), few.kind.weights)  # type: ignore[union-attr]
        self._ids = None if model.kept_ids is None else model.kept_ids.long().contiguous()

    @staticmethod
    def of(model: LanguageModel, few: FewTokens | None) -> DraftSteps | None:
        """Return the steps of a model whose layers the kernel runs, None where it is not made for the rest."""
        way = None if model.state_input is None else model.state_input.way
        head, embeddings = model.head, model.model.get_input_embeddings()
        plain = head.bias is None and head.scale == 1.0 and head.softcap is None and type(embeddings) is nn.Embedding
        return DraftSteps(model, few) if few is not None and plain and way in (None, JOINED, ADDED) else None

    def run(
        self,
        cache: SlotCache,
        slots: Tensor,
        ends: Tensor,
        newest: Tensor,
        carried: Tensor,
        widths: Sequence[int],
        chance: Chance | None,
    ) -> Stepped:
        """Draft on behind the newest tokens.

        Args:
            slots: `[N]` int64.
            ends: `[N]` int64, the places of the newest tokens. Rows at the context's end write to the spare place.
            newest: `[N]` int64, absolute.
            carried: `[N, D]` the draft's states behind the tokens before.
            widths: tokens to choose in each step.
            chance: None if all rows are greedy.
        """
        rows, steps, width = len(newest), len(widths), self.model.width
        states, tokens = carried.clone(), newest.clone()
        ids = torch.empty(rows, sum(widths), dtype=torch.int64)
        finite = torch.empty(rows, steps, dtype=torch.bool)
        probs = None if chance is None else torch.empty(rows, steps, width)
        greedy = None if chance is None or chance.greedy is None else chance.greedy.contiguous()
        drawn = (None, None) if chance is None else (chance.temperatures, chance.uniforms.contiguous())
        temperatures, uniforms = drawn
        places, held = ends.contiguous(), slots.contiguous()
        levels = numbers(widths)
        embeddings = self.model.model.get_input_embeddings().weight
        layers, count, shared = self.few.over(cache)
        most = 0 if uniforms is None else uniforms.shape[-1]
        given = numbers(
            [
                *(rows, steps, most, sum(widths), held.data_ptr(), places.data_ptr(), cache.max_len),
                *(addressof(levels), embeddings.data_ptr(), _at(self._projection), int(self._joined)),
                *(self._norm.data_ptr(), self._head.data_ptr(), width, self._padded, _at(self._ids)),
                *(_at(temperatures), _at(greedy), _at(uniforms), states.data_ptr(), tokens.data_ptr()),
                *(ids.data_ptr(), finite.data_ptr(), _at(probs)),
            ]
        )
        eps, scale, threads = self.few.eps, self.few.scale, torch.get_num_threads()
        vector_kernel().steps[self.few.kind](layers, count, shared, given, eps, EPS, scale, threads)
        return Stepped(ids, finite, probs)


def _at(held: Tensor | None) -> int:
    """Return the address of a tensor, 0 for none."""
    return 0 if held is None else held.data_ptr()
