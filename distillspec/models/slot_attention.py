"""Attention over a slot cache, hooked into any decoder-only transformers model in place of its own.

Compiled code sees one operator. A pass's view must not become a constant of that code, so `passing_view` hands it over.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import local
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from distillspec.models.slot_cache import SlotCache

IMPLEMENTATION = "distillspec_slots"


class CacheView(Protocol):
    """Use of a cache by one pass: rectangles of tokens (`SlotView`), or a flat batch (`FlatView`)."""

    @property
    def cache(self) -> SlotCache: ...

    def write(self, cached: Tensor, new: Tensor) -> None:
        """Write new keys or values of a layer at their places."""
        ...

    def attend(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        scaling: float | None = None,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Return the attention over a layer's keys and values, which hold this pass's tokens already."""
        ...


def slot_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, q, d]
    key: Tensor,  # [B, kv_heads, q, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slot_view: CacheView | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend in place of transformers' own function, which every layer calls. Returns `[B, q, heads, d]`."""
    if s_aux is not None:
        raise NotImplementedError("attention with sinks")
    if torch.compiler.is_dynamo_compiling():
        index: Any = module.layer_idx
        return torch.ops.distillspec.slot_attention(query, key, value, index, scaling, sliding_window, softcap), None
    assert slot_view is not None, "the slot attention needs slot_view passed to the model"
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return _attend(slot_view, layer, query, key, value, scaling, sliding_window, softcap), None


def _attend(
    view: CacheView,
    layer: int,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    keys, values = keep(view, layer, key, value)
    return view.attend(query, keys, values, scaling, window, softcap)


def keep(view: CacheView, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Write new keys and values `[B, kv_heads, q, d]` of a layer. Return all that its cache holds."""
    keys, values = view.cache.layer(layer, key)
    view.write(keys, key)
    view.write(values, value)
    return keys, values


@contextmanager
def passing_view(view: CacheView) -> Iterator[None]:
    """Let compiled code, called in this thread inside the block, use the view."""
    before = getattr(_passed, "view", None)
    _passed.view = view
    try:
        yield
    finally:
        _passed.view = before


def passed_view() -> CacheView:
    """Return the view that compiled code of this thread uses."""
    view: CacheView = _passed.view
    return view


_passed = local()
_library = torch.library.Library("distillspec", "FRAGMENT")
_library.define(
    "slot_attention(Tensor query, Tensor key, Tensor value, int layer, float? scaling, int? window, float? softcap)"
    " -> Tensor"
)


def _compiled_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layer: int,
    scaling: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    return _attend(passed_view(), layer, query, key, value, scaling, window, softcap).contiguous()


def _compiled_attention_shape(query: Tensor, *_: Any) -> Tensor:
    batch, heads, count, dim = query.shape
    return query.new_empty(batch, count, heads, dim)


_library.impl("slot_attention", _compiled_attention, "CompositeExplicitAutograd")
torch.library.register_fake("distillspec::slot_attention", _compiled_attention_shape, lib=_library)


@contextmanager
def slot_attention_in(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with slot attention inside the block."""
    hook(model)
    try:
        yield
    finally:
        unhook(model)


def hook(model: PreTrainedModel) -> None:
    """Give the model slot attention until as many `unhook` calls have followed: several users may share one model."""
    users, before = _hooked.get(model, (0, model.config._attn_implementation))
    if users == 0:
        model.set_attn_implementation(IMPLEMENTATION)
    _hooked[model] = (users + 1, before)


def is_hooked(model: PreTrainedModel) -> bool:
    """Return True if the model has slot attention now: it was hooked, or copied from one that was."""
    return model.config._attn_implementation == IMPLEMENTATION


def unhook(model: PreTrainedModel) -> None:
    """Undo one `hook`. The last one restores the model."""
    users, before = _hooked[model]
    if users > 1:
        _hooked[model] = (users - 1, before)
        return
    del _hooked[model]
    model.set_attn_implementation(before)


# Model → the number of its `hook`s, and the attention it had before.
_hooked: WeakKeyDictionary[PreTrainedModel, tuple[int, str]] = WeakKeyDictionary()

# Without a mask function transformers builds no mask and needs no device sync to detect packed position ids.
AttentionInterface.register(IMPLEMENTATION, slot_attention)
