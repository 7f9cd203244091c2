"""A static key/value cache of slots, hooked into any decoder-only transformers model as its attention.

Row r of a batch lives in slot r; `[slot, position, kv_head, head_dim]` a layer. Nothing is ever copied to grow
or to reorder: a step writes at each row's own position and reads a view of the first rows and positions.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

IMPLEMENTATION = "distillspec_slots"
BUCKET = 64  # key lengths are rounded up to this, so that few shapes occur


@dataclass
class SlotCache:
    """Keys and values of `slots` sequences of at most `max_len` tokens; layers are made on first use."""

    slots: int
    max_len: int
    layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def layer(self, index: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, `[slots, max_len, kv_heads, head_dim]` each; `like [B, kv, q, d]`."""
        if index not in self.layers:
            shape = (self.slots, self.max_len, like.shape[1], like.shape[3])
            self.layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self.layers[index]

    def move(self, source: int, destination: int, length: int) -> None:
        """Copy the first `length` positions of one slot over another's."""
        for keys, values in self.layers.values():
            keys[destination, :length] = keys[source, :length]
            values[destination, :length] = values[source, :length]


@dataclass(frozen=True)
class SlotView:
    """What one forward pass does with the cache.

    Prefill (`rows` given): tokens `[m, L]` start at position 0 of the slots `rows`, right-padded, and attend
    to each other only. Decode (`rows` None): one token for each of the first n slots at `positions [n]`.
    """

    cache: SlotCache
    positions: Tensor | None = None  # [n] int64
    rows: Tensor | None = None  # [m] int64
    reach: int = 0  # decode: keys read a row, a multiple of BUCKET (or max_len)


def slot_attention(
    module: nn.Module,
    query: Tensor,  # [B, heads, q, d]
    key: Tensor,  # [B, kv_heads, q, d]
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    slot_view: SlotView | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The attention function transformers calls in every layer; returns `[B, q, heads, d]`."""
    assert slot_view is not None, "the slot attention needs slot_view passed to the model"
    keys, values = slot_view.cache.layer(int(module.layer_idx), key)  # type: ignore[arg-type]
    if slot_view.rows is not None:
        length = key.shape[2]
        keys[slot_view.rows, :length] = key.transpose(1, 2)
        values[slot_view.rows, :length] = value.transpose(1, 2)
        mask = _prefill_mask(length, sliding_window, query.device)
    else:
        assert slot_view.positions is not None
        rows = torch.arange(query.shape[0], device=query.device)
        keys[rows, slot_view.positions] = key[:, :, 0]
        values[rows, slot_view.positions] = value[:, :, 0]
        key = keys[: len(rows), : slot_view.reach].transpose(1, 2)
        value = values[: len(rows), : slot_view.reach].transpose(1, 2)
        mask = _decode_mask(slot_view.positions, slot_view.reach, sliding_window)
    return _grouped_attention(query, key, value, mask, scaling, softcap), None


def _prefill_mask(length: int, window: int | None, device: torch.device) -> Tensor:
    place = torch.arange(length, device=device)
    mask = place[None, :] <= place[:, None]
    if window is not None:
        mask &= place[None, :] > place[:, None] - window
    return mask[None, None]


def _decode_mask(positions: Tensor, reach: int, window: int | None) -> Tensor:
    place = torch.arange(reach, device=positions.device)
    mask = place[None, :] <= positions[:, None]
    if window is not None:
        mask &= place[None, :] > positions[:, None] - window
    return mask[:, None, None]


def _grouped_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float | None, softcap: float | None
) -> Tensor:
    """Grouped-query attention with the group folded into query rows, so that keys are never repeated."""
    batch, heads, q, dim = query.shape
    groups = heads // key.shape[1]
    folded = query.reshape(batch, key.shape[1], groups * q, dim)
    mask = mask.repeat(1, 1, groups, 1) if q > 1 else mask
    if softcap is None:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scaling)
    else:
        scores = (folded @ key.transpose(-1, -2)) * (scaling if scaling is not None else dim**-0.5)
        scores = torch.tanh(scores / softcap) * softcap
        out = torch.softmax(scores.masked_fill(~mask, float("-inf")), dim=-1) @ value
    return out.reshape(batch, heads, q, dim).transpose(1, 2)


@contextmanager
def slot_attention_in(model: PreTrainedModel) -> Iterator[None]:
    """Run the model with slot attention for a while, then as it was."""
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


AttentionInterface.register(IMPLEMENTATION, slot_attention)
# The mask is ours alone: transformers must not build one for keys it does not know.
AttentionMaskInterface.register(IMPLEMENTATION, lambda *args, **kwargs: None)
