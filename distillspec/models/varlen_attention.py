"""Attention over the slot cache by torch's variable-length attention (FlashAttention: Dao et al. 2022, 2023).

It needs no mask and reads only the keys each row has, for windows of drafted tokens and for prompts. FlashAttention
aligns a row's last query with its last key, so a row counts as `width` tokens here even if some are padding. The keys
in their places belong to the same slot and come after every real token. Each key head of a row is a sequence of its
own here, for that is how the cache holds it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention import varlen

from distillspec.models.slot_cache import SlotView, masked_attention


def varlen_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: SlotView,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend (see `slot_cache.Attend`) in 16 bits on CUDA.

    Masked attention takes over where FlashAttention has no way to express the view: trees, rows that are not neighbours
    in the cache, and windows so near a slot's end that padding would reach past it.

    Raises:
        NotImplementedError: there is a soft cap.
    """
    if softcap is not None:
        raise NotImplementedError("torch's variable-length attention has no soft cap")
    keys, values, view = view.cache.unpaged(keys, values, view)
    batch, heads, width, dim = query.shape
    kv_heads = keys.shape[1]
    slot_len = keys.shape[2]
    longest = view.reach + width
    if view.ancestors is not None or view.first is None or longest > slot_len:
        return masked_attention(query, keys, values, view, scaling, window)
    sequences, groups = batch * kv_heads, heads // kv_heads
    bounds = torch.arange(sequences + 1, dtype=torch.int32, device=query.device)
    slots = slice(view.first, view.first + batch)
    # A row that is nothing but padding starts at the spare place, beyond all others.
    used = (view.places[:, 0] + width).clamp(max=longest).to(torch.int32)
    out = varlen.varlen_attn(
        query.reshape(sequences, groups, width, dim).transpose(1, 2).flatten(0, 1),
        keys[slots].flatten(0, 2)[:, None],
        values[slots].flatten(0, 2)[:, None],
        bounds * width,
        bounds * slot_len,
        width,
        longest,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=groups > 1,
        seqused_k=used.repeat_interleave(kv_heads, output_size=sequences),
    )
    assert isinstance(out, Tensor)  # there is no auxiliary output
    return out.view(batch, kv_heads, width, groups, dim).transpose(1, 2).flatten(2, 3)
