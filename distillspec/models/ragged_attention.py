"""Attention over the slot cache by a Triton kernel that reads only the keys each row has.

Masked attention reads as many keys of every row as the longest one has, rounded up. In a batch of unlike rows that is
most of the memory traffic of decoding, which memory bandwidth bounds. Here every row's keys are read in parts side by
side, each part's softmax is finished on its own, and the parts are weighted by their sums (flash decoding: Dao et al.
2023).
"""

from __future__ import annotations

import torch
from torch import Tensor

from distillspec.models.numerics import power_of_two
from distillspec.models.paged_cache import PagedCache
from distillspec.models.slot_cache import Attend, SlotView, masked_attention

MOST_QUERIES = 128  # folded queries a key head (group · tokens a row). Prompts have more, and masks cost them little
PROGRAMS = 264  # kernel programs to fill a device: two for each of the 132 multiprocessors of the largest GPUs
SHORTEST_PART = 128  # keys
COLUMNS = 64  # keys a kernel reads at once


def ragged_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: SlotView,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    *,
    otherwise: Attend = masked_attention,
) -> Tensor:
    """Attend (see `slot_cache.Attend`) by the kernel for rows of few tokens, chains or trees, else by `otherwise`."""
    batch, heads, width, dim = query.shape
    groups = heads // keys.shape[1]
    if groups * width > MOST_QUERIES:
        return otherwise(query, keys, values, view, scaling, window, softcap)
    from distillspec.models.ragged_kernel import attend_part

    table, columns, page = _block_table(view)
    kv_heads, rows = keys.shape[1], max(16, power_of_two(groups * width))
    part_len, parts = split_parts(view.reach, batch * kv_heads)
    partial = query.new_empty(batch, kv_heads, parts, rows, dim, dtype=torch.float32)
    weight = query.new_empty(batch, kv_heads, parts, rows, dtype=torch.float32)
    query = query if query.stride(-1) == 1 else query.contiguous()
    attend_part[(batch, kv_heads, parts)](
        query,
        keys,
        values,
        view.slots,
        table,
        columns,
        view.places,
        view.positions,
        view.slots if view.base is None else view.base,  # read of trees only
        view.slots if view.ancestors is None else view.ancestors,
        partial,
        weight,
        view.cache.max_len,
        part_len,
        groups,
        width,
        dim**-0.5 if scaling is None else scaling,
        *query.stride()[:3],
        *keys.stride()[:3],
        DIM=dim,
        WINDOW=window or 0,
        SOFTCAP=softcap or 0.0,
        PAGE=page,
        WORDS=0 if view.ancestors is None else view.ancestors.shape[2],
        ROWS=rows,
        COLUMNS=COLUMNS,
        DIMS=max(16, power_of_two(dim)),
    )
    out = _weighed(partial, weight)[:, :, : groups * width]
    return out.to(query.dtype).reshape(batch, heads, width, dim).transpose(1, 2)


def _block_table(view: SlotView) -> tuple[Tensor, int, int]:
    """Return the block table, its row length, and the tokens of a page. Without pages nothing of it is read."""
    cache = view.cache
    return (cache.table, cache.pages.columns, cache.pages.size) if isinstance(cache, PagedCache) else (view.slots, 0, 0)


def _weighed(partial: Tensor, weight: Tensor) -> Tensor:
    """Join parts `[B, kv, parts, M, d]` into `[B, kv, M, d]`. Queries that saw no key give 0."""
    if partial.shape[2] == 1:
        return partial[:, :, 0]
    shares = torch.softmax(weight, dim=2).nan_to_num(0.0)
    return (partial * shares[..., None]).sum(2)


def split_parts(reach: int, programs: int) -> tuple[int, int]:
    """Return the keys a part and the number of parts, which keeps the device busy without very short parts."""
    count = max(1, PROGRAMS // programs)
    length = max(SHORTEST_PART, power_of_two(-(-reach // count)))
    return length, -(-reach // length)
