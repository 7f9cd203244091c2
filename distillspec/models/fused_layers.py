"""Layers of a Llama on CUDA in ten launches each: joined products, and one Triton kernel between two of them.

transformers' layers take some fifty launches of 1 to 4 µs, and the host takes as long to make them. Passes that attend
by the Triton kernel run this way, recorded or not. Others, such as prompts, run by transformers' layers.
"""

from __future__ import annotations

import importlib.util
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from distillspec.models.eagle import PROJECTIONS
from distillspec.models.features import keep_states
from distillspec.models.flat_view import FlatView
from distillspec.models.language_model import LanguageModel, attention_heads
from distillspec.models.numerics import power_of_two
from distillspec.models.plain_llama import GATED, has_llama_layers, products_of
from distillspec.models.ragged_attention import MOST_QUERIES, attend_parts, is_ragged, join
from distillspec.models.slot_cache import SlotCache

BLOCK = 1024  # gated states that a program computes


class FusedLayers:
    """The layers of one model, for passes over windows of few tokens.

    The model's own weights become parts of the joined ones, so that they take no more memory. Make this before anything
    is recorded that reads the weights.
    """

    def __init__(self, model: LanguageModel) -> None:
        config = model.model.config.get_text_config()
        self.model, self.heads = model, attention_heads(model)
        self.eps, self.scale = float(config.rms_norm_eps), float(model.layers[0].self_attn.scaling)  # type: ignore[arg-type, union-attr]
        self._layers = [_Layer.of(layer) for layer in model.layers]
        self._final: Tensor = model.decoder.norm.weight.detach()  # type: ignore[union-attr, operator]
        self._angles: tuple[int, Tensor, Tensor] = (0, self._final, self._final)

    @staticmethod
    def fit(model: LanguageModel) -> bool:
        """Return True for a model that they are made for: Llama's layers that read tokens alone."""
        if importlib.util.find_spec("triton") is None or model.dtype == torch.float64:
            return False
        if model.state_input is not None or not has_llama_layers(model):
            return False
        products = [product for layer in model.layers for product in products_of(layer)]
        if any(type(product) is not nn.Linear for product in products):  # adapters
            return False
        return all(part.weight.dtype == model.dtype and part.weight.device == model.device for part in products)

    def takes(self, view: FlatView) -> bool:
        """Return True for a pass over one rectangle of windows, over a cache that the Triton kernel reads."""
        group = view.groups[0]
        queries = self.heads.query // self.heads.kv * group.view.places.shape[1]
        return len(view.groups) == 1 and queries <= MOST_QUERIES and is_ragged(view.cache.attend)

    def hidden(self, view: FlatView, tokens: Tensor, fed: Tensor | None = None) -> Tensor:
        """Return what `FlatView.hidden` does, `[N, D]`. For the arguments see there."""
        cache, addresses = view.cache, _Addresses.of(view)
        states: Tensor = self.model.model.get_input_embeddings()(tokens.clamp(min=0))[0].contiguous()
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            read = add_norm(states, delta, layer.before, self.eps)
            self._keep(view, states, index)
            attended = self._attend(view, addresses, cache, index, linear(read, layer.qkv))
            read = add_norm(states, linear(attended, layer.out), layer.behind, self.eps)
            delta = linear(gate(linear(read, layer.gated)), layer.down)
        last = add_norm(states, delta, self._final, self.eps)
        self._keep(view, states, len(self._layers))
        return last

    def _attend(self, view: FlatView, addresses: _Addresses, cache: SlotCache, index: int, product: Tensor) -> Tensor:
        """Return a layer's attention `[N, heads · d]`, given queries, keys and values `[N, …]` side by side."""
        heads, (group,) = self.heads, view.groups
        rows, width = group.view.places.shape
        like = product.view(1, len(product), -1, heads.dim).transpose(1, 2)[:, : heads.kv]
        keys, values = cache.layer(index, like)
        query = product.new_empty(rows * width, heads.query, heads.dim)
        turn_and_keep(product, *self._turned(cache.max_len), addresses, query, keys, values, cache.max_len)
        rectangle = query.view(rows, width, heads.query, heads.dim).transpose(1, 2)
        parts = attend_parts(rectangle, keys, values, group.view, self.scale)
        return join(*parts, heads.query, width, product.dtype, addresses.back).flatten(1)

    @staticmethod
    def _keep(view: FlatView, states: Tensor, state: int) -> None:
        """Keep a state of the tokens where the cache does, as a `FeatureTap` would."""
        ids = view.cache.state_ids
        if state in ids:
            keep_states(view, states[None], ids.index(state), ids)

    def _turned(self, positions: int) -> tuple[Tensor, Tensor]:
        """Return cosines and sines of all positions `[positions, dim]`, rounded as the model's own are."""
        if self._angles[0] != positions:
            all_positions = torch.arange(positions, device=self._final.device)[None]
            cosines, sines = self.model.decoder.rotary_emb(self._final, all_positions)  # type: ignore[operator]
            self._angles = positions, cosines[0].contiguous(), sines[0].contiguous()
        return self._angles[1:]


class _Layer(NamedTuple):
    """Weights of a layer, those of one input joined."""

    before: Tensor  # [D], of the norm before attention
    qkv: Tensor
    out: Tensor
    behind: Tensor  # of the norm behind it
    gated: Tensor
    down: Tensor

    @classmethod
    def of(cls, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        qkv = _joined([getattr(attention, name) for name in PROJECTIONS])
        gated = _joined([getattr(mlp, name) for name in GATED])
        weights = (layer.input_layernorm, qkv, attention.o_proj, layer.post_attention_layernorm, gated, mlp.down_proj)
        return cls(*(weight if isinstance(weight, Tensor) else weight.weight.detach() for weight in weights))


def _joined(parts: list[nn.Linear]) -> Tensor:
    """Return one tensor of the weights of some products, below each other. From now on each weight is a part of it."""
    weights = [part.weight.detach() for part in parts]
    first, ends = weights[0], accumulate(weight.numel() for weight in weights)
    begins = [first.storage_offset() + start for start in (0, *ends)][: len(parts)]
    is_one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if is_one_storage and [weight.storage_offset() for weight in weights] == begins:
        return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())
    with torch.inference_mode(False), torch.no_grad():  # whoever trains the model later can
        whole = torch.cat(weights)
        for part, part_weight in zip(parts, whole.split(list(map(len, weights))), strict=True):
            part.weight.data = part_weight
    return whole


class _Addresses(NamedTuple):
    """Where each token of a pass goes, `[N]` int64 each."""

    positions: Tensor  # of rotary embeddings
    places: Tensor  # in the token's slot
    rows: Tensor  # of the cache's tensors: the slot or page
    inside: Tensor  # the place in this row
    back: Tensor  # the cell in the rectangle of queries

    @classmethod
    def of(cls, view: FlatView) -> _Addresses:
        back = view.groups[0].back
        if back is None:
            back = torch.arange(len(view.places), device=view.places.device)
        return cls(view.positions[0], view.places, *view.cache.located(view.slots, view.places), back)


def add_norm(states: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta [N, D]` to `states [N, D]` in place, and return the sum by its root mean square, times `weight`."""
    from distillspec.models import fused_kernels

    out, width = torch.empty_like(states), states.shape[1]
    wide = power_of_two(width)
    more = states if delta is None else delta
    fused_kernels.add_norm[(len(states),)](states, more, weight, out, width, eps, ADDS=delta is not None, WIDTH=wide)
    return out


def turn_and_keep(
    product: Tensor,
    cosines: Tensor,
    sines: Tensor,
    addresses: _Addresses,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    spare: int,
) -> None:
    """Rotate queries and keys of `product [N, (heads + 2 · kv) · d]`, and put all into `query` and the cache."""
    from distillspec.models import fused_kernels

    heads = query.shape[1]
    dim = query.shape[2]
    kv_heads = keys.shape[1]
    fused_kernels.turn_and_keep[(len(product), heads + 2 * kv_heads)](
        product,
        cosines,
        sines,
        *addresses,
        query,
        keys,
        values,
        spare,
        heads,
        kv_heads,
        *keys.stride()[:3],
        DIM=dim,
        HALF=power_of_two(dim // 2),
    )


def gate(product: Tensor) -> Tensor:
    """Return silu(gate) · up `[N, I]` of `product [N, 2 I]`."""
    from distillspec.models import fused_kernels

    inner = product.shape[1] // 2
    out = product.new_empty(len(product), inner)
    fused_kernels.gate[(len(product), -(-inner // BLOCK))](product, out, inner, BLOCK=BLOCK)
    return out
