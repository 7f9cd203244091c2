"""Made-up slots to look into, for the tests of attention over them, and torch's description of its kernel in code."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import torch
from torch import Tensor

from distillspec.models.ancestors import ancestor_words
from distillspec.models.slot_cache import Attend, SlotCache, SlotView, masked_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def cache_view(starts: list[int], counts: list[int], slots: list[int], max_len: int = 400) -> SlotView:
    cache = SlotCache(max(slots) + 1, max_len)
    return SlotView.append(cache, slots, torch.tensor(starts, device=DEVICE), torch.tensor(counts, device=DEVICE))


def tree_view(view: SlotView, seed: int, chains: int = 0) -> SlotView:
    """Return the view with a random tree in each row, chains in the first `chains` rows."""
    chance, (rows, width) = Random(seed), view.places.shape
    parents = [[-1, *(chance.randrange(node) for node in range(1, width))] for _ in range(rows - chains)]
    words = torch.from_numpy(ancestor_words([[]] * chains + parents, width))
    depths = [list(range(width))] * chains + [_depths(own) for own in parents]
    base = view.places[:, 0].contiguous()
    positions = base[:, None] + torch.tensor(depths, device=DEVICE)
    return replace(view, base=base, positions=positions, ancestors=words.to(DEVICE))


def _depths(parents: list[int]) -> list[int]:
    depths: list[int] = []
    for parent in parents:
        depths.append(0 if parent < 0 else depths[parent] + 1)
    return depths


def both(
    attend: Attend,
    view: SlotView,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype = torch.float32,
    **how: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs of `attend` and of masked attention at tokens that are no padding."""
    generator = torch.Generator().manual_seed(1)
    batch, width = view.places.shape
    query = torch.randn(batch, heads, width, dim, generator=generator).to(DEVICE, dtype)
    held = (view.cache.slots, kv_heads, view.cache.max_len + 1, dim)
    keys, values = (torch.randn(held, generator=generator).to(DEVICE, dtype) for _ in range(2))
    real = view.places < view.cache.max_len
    outputs = [look(query, keys, values, view, **how)[real] for look in (attend, masked_attention)]  # type: ignore[arg-type]
    return outputs[0], outputs[1]


def varlen_described(
    query: Tensor,  # [tokens, heads, d]
    key: Tensor,  # [places, kv_heads, d]
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor,
) -> Tensor:
    """`torch.nn.attention.varlen.varlen_attn` after its documentation, sequence by sequence."""
    assert all(bounds.dtype == torch.int32 for bounds in (cu_seq_q, cu_seq_k, seqused_k))
    assert cu_seq_q[-1] == len(query)
    assert cu_seq_k[-1] == len(key) == len(value)
    groups = query.shape[1] // key.shape[1]
    assert enable_gqa or groups == 1
    left, right = window_size
    assert right == 0
    rows = []
    for row in range(len(seqused_k)):
        asked = query[cu_seq_q[row] : cu_seq_q[row + 1]]
        used, first = int(seqused_k[row]), int(cu_seq_k[row])
        assert len(asked) <= max_q
        assert used <= max_k
        assert first + used <= cu_seq_k[row + 1]
        held = [kv[first : first + used].repeat_interleave(groups, 1) for kv in (key, value)]
        last = torch.arange(len(asked)) + used - len(asked)  # the last query sees the last key
        place = torch.arange(used)
        seen = place <= last[:, None]
        seen = seen if left < 0 else seen & (place >= last[:, None] - left)
        scores = torch.einsum("qhd,khd->hqk", asked, held[0]) * (
            scale if scale is not None else query.shape[-1] ** -0.5
        )
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        rows.append(torch.einsum("hqk,khd->qhd", weights, held[1]))
    return torch.cat(rows)
