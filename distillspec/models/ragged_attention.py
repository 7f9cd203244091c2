"""Attention over the slot cache by a Triton kernel that reads only the keys each row has.

Masked attention reads as many keys of every row as the longest one has, rounded up. In a batch of unlike rows that is
most of the memory traffic of decoding, which memory bandwidth bounds. Here every row's keys are read in parts side by
side, each part's softmax is finished on its own, and the parts are weighted by their sums (flash decoding: Dao et al.
2023).
"""

from __future__ import annotations

from functools import partial as partial_function
from typing import Any

import torch
from torch import Tensor

from distillspec.models.numerics import power_of_two
from distillspec.models.paged_cache import PagedCache
from distillspec.models.slot_cache import Attend, SlotView, masked_attention

MOST_QUERIES = 128  # folded queries a key head (group · tokens a row). Prompts have more, and masks cost them little
PROGRAMS = 264  # kernel programs to fill a device: two for each of the 132 multiprocessors of the largest GPUs
SHORTEST_PART = 128  # keys
COLUMNS = 64  # keys a kernel reads at once
PARTS_A_STEP = 16  # parts that are joined at once


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
    partial, weight = attend_parts(query, keys, values, view, scaling, window, softcap)
    return join(partial, weight, heads, width, query.dtype).view(batch, width, heads, dim)


def is_ragged(attend: Attend) -> bool:
    """Return True for `ragged_attention`, with whatever it leaves to others."""
    of: Any = attend.func if isinstance(attend, partial_function) else attend
    return of is ragged_attention


def attend_parts(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: SlotView,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend to the parts of each row's keys, at most `MOST_QUERIES` folded queries a key head (group · q + token).

    Returns:
        Each part's own attention `[B, kv, parts, M, d]` and the logarithm of its sum of exponentials
        `[B, kv, parts, M]`, float32. M is the folded queries rounded up.
    """
    from distillspec.models.ragged_kernel import attend_part

    batch, heads, width, dim = query.shape
    kv_heads, groups = keys.shape[1], heads // keys.shape[1]
    table, columns, page = _block_table(view)
    rows = max(16, power_of_two(groups * width))
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
    return partial, weight


def join(
    partial: Tensor, weight: Tensor, heads: int, width: int, dtype: torch.dtype, back: Tensor | None = None
) -> Tensor:
    """Weigh the parts of `attend_parts` by their sums. Return `[tokens, heads, d]`, 0 of queries that saw no key.

    Args:
        back: `[tokens]` int64, the cell of each token in the rectangle `[B, q]`. None: all of it, in order.
    """
    from distillspec.models.ragged_kernel import join_parts

    batch, kv_heads, parts, rows, dim = partial.shape
    tokens = batch * width if back is None else len(back)
    out = partial.new_empty(tokens, heads, dim, dtype=dtype)
    join_parts[(tokens, heads)](
        partial,
        weight,
        weight if back is None else back,
        out,
        parts,
        heads // kv_heads,
        width,
        INDEXED=back is not None,
        ROWS=rows,
        DIM=dim,
        DIMS=max(16, power_of_two(dim)),
        PARTS=max(2, power_of_two(parts)),
        STEP=max(2, min(PARTS_A_STEP, power_of_two(parts))),
    )
    return out


def _block_table(view: SlotView) -> tuple[Tensor, int, int]:
    """Return the block table, its row length, and the tokens of a page. Without pages nothing of it is read."""
    cache = view.cache
    return (cache.table, cache.pages.columns, cache.pages.size) if isinstance(cache, PagedCache) else (view.slots, 0, 0)


def split_parts(reach: int, programs: int) -> tuple[int, int]:
    """Return the keys a part and the number of parts, which keeps the device busy without very short parts."""
    count = max(1, PROGRAMS // programs)
    length = max(SHORTEST_PART, power_of_two(-(-reach // count)))
    return length, -(-reach // length)
