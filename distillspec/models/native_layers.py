"""Layers of a Llama on CPUs, in one call of C++ (`native_layers.cpp`).

It is made for passes over few tokens, and takes larger ones where it is faster than torch (`most_tokens`). For a token
a layer reads some megabytes of weights, which takes less time than torch's fifty operators around them.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from distillspec.models.eagle import PROJECTIONS
from distillspec.models.flat_view import FlatView
from distillspec.models.half_weights import fits_half
from distillspec.models.language_model import LanguageModel, attention_heads
from distillspec.models.large_pages import LargePages
from distillspec.models.memory import free_bytes
from distillspec.models.native_rows import NativeRows
from distillspec.models.packed_layer import PackedLayer, is_built, kind_of
from distillspec.models.packed_linear import SHARE, SMALLEST
from distillspec.models.plain_llama import has_llama_layers
from distillspec.models.slot_cache import SlotCache
from distillspec.models.state_input import DeferredNorm
from distillspec.native.library import NotBuilt
from distillspec.native.vector_kernel import WEIGHTS, Kind, numbers, vector_kernel

# Tokens of a pass. The first number is for bfloat16 multiplied in pairs, and for float32 with AVX2 alone: longer texts
# are read in parts. A prompt's chunk of 512 fits beside decoding rows: a second call would read all weights again.
# Elsewhere torch takes larger passes.
MOST_TOKENS, MOST_ELSEWHERE = 576, 48
AVX2 = 8  # lanes
MOST_NODES = 64  # of a tree: they are bits of a word


class NativeLayers:
    """The layers of one model, for passes over at most `most` tokens.

    Sums, and what passes from layer to layer, are float32. With weights of 16 bits a token's result does not depend on
    the tokens read beside it. Weights must not change while this exists.

    Args:
        eight: weights are codes of at most 8 bits (`VectorKernel.codes`) where the kernel has any. Else they have 16.
    """

    def __init__(self, model: LanguageModel, *, eight: bool = False) -> None:
        self.model, decoder = model, model.decoder
        self.kind = kind_of(model, eight=eight)
        config = model.model.config.get_text_config()
        heads = attention_heads(model)
        self._sizes = [config.hidden_size, config.intermediate_size, heads.query, heads.kv, heads.dim]
        self._like = torch.empty(1, heads.kv, 1, heads.dim, dtype=model.dtype)
        self.most = most_tokens(model.dtype)
        # Texts of any length are read in slices, so that none is read differently because of those beside it.
        self.takes_all_chains = self.most == MOST_TOKENS
        self.eps, self.scale = float(config.rms_norm_eps), float(model.layers[0].self_attn.scaling)  # type: ignore[arg-type, union-attr]
        self.pages = LargePages()
        self._layers = [_packed_layer(layer, self.kind, self.pages) for layer in model.layers]
        deferred = isinstance(decoder.norm, DeferredNorm)
        self._final = None if deferred else decoder.norm.weight.detach().float().contiguous()  # type: ignore[union-attr, operator]
        self._bound: tuple[Tensor, Any, Any] | None = None
        self._angles: tuple[int, Tensor, Tensor] = (0, torch.empty(0), torch.empty(0))

    @staticmethod
    def of(model: LanguageModel, *, exact: bool = True, eight: bool = False, tokens: int = 1) -> NativeLayers | None:
        """Return the layers of a model that the kernel is made for, None for others and where it cannot be built.

        Args:
            exact: 16 bits must hold the model's weights, scaled. A draft's may be rounded: what it proposes is judged
                by the probabilities that it proposed it with.
            eight: see `NativeLayers`. Not for exact ones.
            tokens: passes of so many must be taken.
        """
        eight = eight and not exact
        if not _is_made_for(model) or tokens > most_tokens(model.dtype) or not is_built(kind_of(model, eight=eight)):
            return None
        return NativeLayers(model, eight=eight) if not exact or _fits_sixteen_bits(model) else None

    def takes(self, view: FlatView) -> bool:
        """Return True for a pass over a cache of slots that has at most `most` tokens."""
        fits = all(each.view.ancestors is None or each.view.places.shape[1] <= MOST_NODES for each in view.groups)
        return fits and len(view.places) <= self.most and type(view.cache) is SlotCache

    def takes_chains(self, cache: SlotCache, counts: Sequence[int], *, sliced: bool = False) -> bool:
        """Return True for chains of so many tokens.

        Args:
            sliced: they may be read in passes of at most `most` tokens (`NativeRows.slices`).
        """
        fits = sum(counts) <= self.most or (sliced and self.takes_all_chains)
        return fits and type(cache) is SlotCache

    def takes_rows(self, cache: SlotCache, counts: Sequence[int], nodes: int = 0) -> bool:
        """Return True for rows of so many tokens, in slices if need be, among them trees of at most `nodes`."""
        return nodes <= MOST_NODES and self.takes_chains(cache, counts, sliced=True)

    def takes_level(self, tokens: int) -> bool:
        """Return True for trees whose largest level has so many tokens, of all rows."""
        return tokens <= self.most

    def hidden(self, view: FlatView, tokens: Tensor, fed: Tensor | None = None) -> Tensor:
        """Return what `FlatView.hidden` does, `[N, D]`. For the arguments see there."""
        return self.hidden_of(view.cache, NativeRows.of(view), tokens, fed)

    def hidden_of(self, cache: SlotCache, rows: NativeRows, tokens: Tensor, fed: Tensor | None = None) -> Tensor:
        """Return the same for rows of a cache."""
        read = self._input(tokens, fed)
        out = read.new_empty(len(read), self._sizes[0])
        columns = numbers(self._columns(cache))
        vector_kernel().layers[self.kind](
            *self.over(cache),
            numbers(rows.numbers),
            numbers([*self._kept(cache, out), ctypes.addressof(columns)]),
            read.data_ptr(),
            read.shape[1],
            0 if self._final is None else self._final.data_ptr(),
            out.data_ptr(),
            self.eps,
            self.scale,
            torch.get_num_threads(),
        )
        return out

    def _input(self, tokens: Tensor, fed: Tensor | None) -> Tensor:
        """Return what the first layer reads `[N, D]`, or embeddings and states side by side `[N, 2 D]`."""
        embeddings: Tensor = self.model.model.get_input_embeddings()(tokens.clamp(min=0))
        joins = self.model.state_input
        if joins is None:
            return embeddings[0].contiguous()
        states = torch.zeros_like(embeddings) if fed is None else fed[None]
        read: Tensor = joins(embeddings, states, tokens)
        return read[0].contiguous()

    def _turned(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all positions `[positions, dim]` float32."""
        if self._angles[0] != positions:
            position_ids = torch.arange(positions)[None]
            cosines, sines = self.model.decoder.rotary_emb(torch.empty(1, dtype=torch.float32), position_ids)  # type: ignore[operator]
            self._angles = positions, cosines[0].contiguous(), sines[0].contiguous()
        return self._angles[1:]

    def _columns(self, cache: SlotCache) -> list[int]:
        """Return where each state begins among those that the cache keeps of a token, −1 for others."""
        columns = [-1] * (1 + len(self._layers))
        for index, state in enumerate(cache.state_ids):
            columns[state] = index * self._sizes[0]
        return columns

    def _kept(self, cache: SlotCache, like: Tensor) -> list[int]:
        """Return where the cache keeps states: the address, 0 for none, and strides of slots and places."""
        if not cache.state_ids:
            return [0, 0, 0]
        states = cache.kept_states(like, self._sizes[0])
        return [states.data_ptr(), states.stride(0), states.stride(2)]

    def over(self, cache: SlotCache) -> tuple[Any, int, Any]:
        """Return the layers over a cache's keys and values, how many they are, and what they share, for the kernel.

        Kept until another cache comes, or other tensors in it.
        """
        first, _ = cache.layer(0, self._like)
        if self._bound is None or self._bound[0] is not first:
            pointers = []
            for index, layer in enumerate(self._layers):
                keys, values = cache.layer(index, self._like)
                pointers += [*layer.pointers, keys.data_ptr(), values.data_ptr(), *keys.stride()[:3]]
            angles = self._turned(cache.max_len)
            shared = numbers([*self._sizes, *(each.data_ptr() for each in angles)])
            self._bound = first, numbers(pointers), shared
        return self._bound[1], len(self._layers), self._bound[2]


def _packed_layer(layer: Any, kind: Kind, pages: LargePages) -> PackedLayer:
    norms = (layer.input_layernorm, getattr(layer, "hidden_norm", None), layer.post_attention_layernorm)
    return PackedLayer.of(_weights(layer), norms, kind, pages)


def _weights(layer: Any) -> tuple[Tensor, ...]:
    """Return the weights of a layer's four products."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = torch.cat([getattr(attention, name).weight for name in PROJECTIONS])
    # Blocks of gate and up alternate, so that one thread computes both for an output.
    parts = [part.weight.unflatten(0, (-1, vector_kernel().lanes)) for part in (mlp.gate_proj, mlp.up_proj)]
    gate_up = torch.stack(parts, 1).flatten(0, 2)
    return tuple(weight.detach() for weight in (qkv, attention.o_proj.weight, gate_up, mlp.down_proj.weight))


def most_tokens(dtype: torch.dtype) -> int:
    """Return the most tokens of a pass in which the kernel is the fastest here."""
    kernel = vector_kernel()
    if dtype == torch.bfloat16 and kernel.by_pairs:
        return MOST_TOKENS
    avx2 = kernel.lanes == AVX2 and platform.machine() == "x86_64"
    return MOST_TOKENS if avx2 and dtype == torch.float32 else MOST_ELSEWHERE


def _is_made_for(model: LanguageModel) -> bool:
    """Return True for Llama layers of dimensions that fill vectors, large enough that packing helps."""
    if model.device.type != "cpu" or model.dtype not in WEIGHTS or not has_llama_layers(model):
        return False
    try:
        lanes = vector_kernel().lanes
    except NotBuilt:
        return False
    config, heads = model.model.config.get_text_config(), attention_heads(model)
    width, inner = config.hidden_size, config.intermediate_size
    fits = width % lanes == inner % lanes == heads.dim % (2 * lanes) == 0 and heads.query % heads.kv == 0
    weights = (part.weight for part in model.layers.modules() if isinstance(part, nn.Linear))
    return fits and 2 * inner * width >= SMALLEST and fit_memory(model, weights)


def _fits_sixteen_bits(model: LanguageModel) -> bool:
    return model.dtype == torch.bfloat16 or all(
        fits_half(weight, exact=True) for layer in model.layers for weight in _weights(layer)
    )


def fit_memory(model: LanguageModel, weights: Iterable[Tensor]) -> bool:
    """Return True if there is room for copies of these weights in 16 bits."""
    free = free_bytes(model.device)
    return free is None or 2 * sum(weight.numel() for weight in weights) <= SHARE * free
