"""Attention over the slot cache in pieces of long rows: SPIN's request decomposition (Chen et al. 2025).

Masked attention reads as many keys of every row as the longest one has. Here long rows are cut into pieces, which stand
beside short rows in one rectangle with less padding. Each piece attends with a maximum and a sum of its own, and the
pieces of a row are joined by them (log-sum-exp; the paper's Eq. 13, with the maximum and the scale that it leaves out).

Kernels that read each row's own keys have no padding and need none of this. It is for devices without such a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.models.slot_cache import SlotView


def split_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: SlotView,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend (see `slot_cache.Attend`) by torch's own operations, for any device and dtype, chains and trees."""
    keys, values, view = view.cache.unpaged(keys, values, view)
    batch, heads, q, dim = query.shape
    kv_heads, groups = keys.shape[1], heads // keys.shape[1]
    rows, places = _pieces(view, groups * q)
    mask = _mask_of(view, rows, places, window, groups, query.dtype)
    slots = view.slots[rows][:, None]
    key, value = (cached.transpose(1, 2)[slots, places].transpose(1, 2) for cached in (keys, values))  # [P, kv, L, d]
    folded = query.reshape(batch, kv_heads, groups * q, dim)[rows]
    scores = (folded @ key.transpose(-1, -2)) * (dim**-0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores + mask
    largest = scores.amax(-1)  # −inf where a piece has nothing to see
    weights = torch.exp(scores - largest.clamp(min=torch.finfo(scores.dtype).min)[..., None])
    joined = _joined(weights @ value, weights.sum(-1), largest, rows, batch)
    return joined.reshape(batch, heads, q, dim).transpose(1, 2)


def piece_length(lengths: Sequence[int], copied: int) -> int:
    """Return the length of pieces that costs least: padded keys, and `copied` keys' worth of queries a piece.

    Rows are cut into pieces of at most this length, and every piece takes as much. A row in k pieces needs at least its
    k-th part, so only such lengths can be the best.
    """
    longest = max(lengths)
    candidates = {-(-length // parts) for length in set(lengths) for parts in range(1, longest // max(1, copied) + 2)}
    return min(sorted(candidates), key=lambda length: pieces_cost(lengths, length, copied))


def pieces_cost(lengths: Sequence[int], length: int, copied: int) -> int:
    """Return the keys that pieces of a length read, padding and copied queries included."""
    return sum(-(-row_len // length) for row_len in lengths) * (length + copied)


def _pieces(view: SlotView, copied: int) -> tuple[Tensor, Tensor]:
    """Return the row of each piece `[P]`, and its places `[P, L]`. Those behind its row's text are masked."""

    def make() -> Tensor:
        padding = view.cache.max_len
        ends = torch.where(view.places < padding, view.places + 1, 1).amax(1).tolist()  # the one read of the host
        length = piece_length(ends, copied)
        cut = [(row, start) for row, end in enumerate(ends) for start in range(0, end, length)]
        rows, starts = torch.tensor(cut, device=view.places.device).T
        places = starts[:, None] + torch.arange(length, device=view.places.device)
        return torch.cat([rows[:, None], places], 1)

    pieces = view.kept(("pieces", copied), make)
    return pieces[:, 0], pieces[:, 1:].clamp(max=view.reach - 1)


def _mask_of(
    view: SlotView, rows: Tensor, places: Tensor, window: int | None, groups: int, dtype: torch.dtype
) -> Tensor:
    """Return the term added to the scores of pieces, `[P, 1, groups · q, L]`."""

    def make() -> Tensor:
        whole = view.mask(window, groups, dtype)[rows, 0]  # [P, groups · q, reach]
        index = places[:, None].expand(-1, whole.shape[1], -1)
        twice = torch.nn.functional.pad(places.diff(dim=1) == 0, (1, 0))[:, None]  # places clamped at the end
        return whole.gather(2, index).masked_fill(twice, -torch.inf)[:, None]

    return view.kept(("pieces' mask", window, groups, dtype), make)


def _joined(sums: Tensor, totals: Tensor, largest: Tensor, rows: Tensor, batch: int) -> Tensor:
    """Join what pieces have summed `[P, kv, M, d]` by their totals and maxima `[P, kv, M]` into `[B, kv, M, d]`."""
    shape = (batch, *largest.shape[1:])
    index = rows.view(-1, *[1] * (largest.dim() - 1)).expand_as(largest)
    highest = largest.new_full(shape, -torch.inf).scatter_reduce(0, index, largest, "amax")
    shares = torch.exp(largest - highest[rows]).nan_to_num(0.0)  # rows that see nothing: padding
    total = totals.new_zeros(shape).index_add(0, rows, totals * shares)
    joined = sums.new_zeros(batch, *sums.shape[1:]).index_add(0, rows, sums * shares[..., None])
    return joined / total.clamp(min=torch.finfo(total.dtype).tiny)[..., None]
