"""Heads of a draft without attention (`heads.py`) on CPUs, for the trees that `DraftSteps` grows in one call of C++."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from distillspec.models.heads import Head
from distillspec.models.language_model import LanguageModel
from distillspec.models.large_pages import LargePages
from distillspec.models.native_layers import fit_memory, most_tokens
from distillspec.models.packed_layer import PackedLayer, is_built, kind_of
from distillspec.models.slot_cache import SlotCache
from distillspec.native.library import NotBuilt
from distillspec.native.vector_kernel import WEIGHTS, numbers, vector_kernel


class NativeHeads:
    """The heads of one draft, run by the kernel. It has what `DraftSteps` needs of `NativeLayers`.

    Weights must not change while this exists.

    Args:
        eight: see `NativeLayers`.
    """

    scale = 1.0  # of attention, which heads do not have

    def __init__(self, model: LanguageModel, *, eight: bool = False) -> None:
        self.kind = kind_of(model, eight=eight)
        self.pages = LargePages()
        self.most = most_tokens(model.dtype)
        self.eps = float(model.model.config.rms_norm_eps)
        heads: list[Head] = list(model.layers)  # type: ignore[arg-type]
        inner = heads[0].down_proj.in_features
        self._packed = [PackedLayer.of(_weights(head), _norms(head), self.kind, self.pages) for head in heads]
        no_cache = [0] * 5
        self._heads = numbers([number for head in self._packed for number in (*head.pointers, *no_cache)])
        self._shared = numbers([model.model.config.hidden_size, inner, *[0] * 5])

    @staticmethod
    def of(model: LanguageModel, *, eight: bool = False) -> NativeHeads | None:
        """Return the heads of a model that the kernel is made for, None for others and where it cannot be built."""
        if model.device.type != "cpu" or model.dtype not in WEIGHTS or model.attends:
            return None
        try:
            lanes = vector_kernel().lanes
        except NotBuilt:
            return None
        weights = (part.weight for part in model.layers.modules() if isinstance(part, nn.Linear))
        fits = model.model.config.hidden_size % lanes == 0 and fit_memory(model, weights)
        return NativeHeads(model, eight=eight) if fits and is_built(kind_of(model, eight=eight)) else None

    def takes_chains(self, cache: SlotCache, counts: Sequence[int]) -> bool:
        """See `NativeLayers.takes_chains`."""
        return sum(counts) <= self.most and type(cache) is SlotCache

    def takes_level(self, tokens: int) -> bool:
        """See `NativeLayers.takes_level`."""
        return tokens <= self.most

    def over(self, cache: SlotCache) -> tuple[Any, int, Any]:
        """See `NativeLayers.over`. Heads keep nothing in the cache."""
        return self._heads, len(self._packed), self._shared


def _weights(head: Head) -> tuple[Any, ...]:
    up = head.up_proj.weight.detach() if head.sequential else None
    return None, None, up, head.down_proj.weight.detach()


def _norms(head: Head) -> tuple[Any, ...]:
    return (head.embedding_norm, head.state_norm, None) if head.sequential else (None, None, None)
