"""Draws from probabilities, and argmax.

`uniforms` decide the draws: the same row and uniform give the same id in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor

# Ids in a block. A draw finds its block first, then the id, in one cheap pass over the vocabulary.
_DRAW_BLOCK = 256
_NARROW = 32 * _DRAW_BLOCK  # rows of at most so many ids are searched whole: every operation costs microseconds


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return token ids `[...]` int64 by inverse CDF from `probs [..., V]` and `uniforms [...]` in [0, 1).

    Rows need not be normalised. An id of zero probability is never returned, not even for u = 0 or u = 1.

    Raises:
        ValueError: a row sums to 0 or is not finite.
    """
    rows = probs.reshape(-1, probs.shape[-1])
    sums = _block_sums(rows)
    total = sums.sum(-1)
    if not bool(((total > 0) & torch.isfinite(total)).all()):
        raise ValueError("draw: a row of probabilities sums to zero or is not finite")
    return _draw(rows, sums, uniforms)


def best_ids(logits: Tensor) -> Tensor:
    """Return the argmax `[...]` int64 of `logits [..., V]`: the lowest of equal ids, or the id of a NaN.

    CPUs go by blocks in wide rows: torch finds maxima there five times as fast as their indices.
    """
    whole = logits.shape[-1] // _DRAW_BLOCK * _DRAW_BLOCK
    if logits.device.type != "cpu" or logits.shape[-1] <= _NARROW:
        return logits.argmax(-1)
    blocks = logits[..., :whole].unflatten(-1, (-1, _DRAW_BLOCK))
    best, block = blocks.amax(-1).max(-1)
    inside = blocks.gather(-2, block[..., None, None].expand(*block.shape, 1, _DRAW_BLOCK))[..., 0, :]
    ids = block * _DRAW_BLOCK + inside.argmax(-1)
    if whole == logits.shape[-1]:
        return ids
    tail = logits[..., whole:]
    later, place = tail.max(-1)
    return torch.where((later > best) | (later.isnan() & ~best.isnan()), whole + place, ids)


def draw_unchecked(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw as `draw` does, without a device sync. A row without mass gives an arbitrary id."""
    rows = probs.reshape(-1, probs.shape[-1])
    if rows.device.type == "cpu" and rows.shape[-1] <= _NARROW:
        return _draw_narrow(rows, uniforms.reshape(-1)).reshape(uniforms.shape)
    return _draw(rows, _block_sums(rows), uniforms)


def draw_each(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Return m independent draws `[R, m]` int64 from each row of `probs [R, V]`, for `uniforms [R, m]`.

    Takes one pass over `probs`, without a device sync (see `draw_unchecked`).
    """
    sums = _block_sums(probs)
    return torch.stack([_draw(probs, sums, column) for column in uniforms.unbind(-1)], -1)


def _draw(rows: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    levels = uniforms.reshape(-1).double().clamp(0, 1)
    block, rest = _locate(sums, levels * sums.sum(-1))
    places = block[:, None] * _DRAW_BLOCK + torch.arange(_DRAW_BLOCK, device=rows.device)
    inside = rows.gather(-1, places.clamp(max=rows.shape[-1] - 1)).double() * (places < rows.shape[-1])
    ids = block * _DRAW_BLOCK + _locate(inside, rest)[0]
    if rows.device.type == "cpu":
        return ids.clamp_(max=rows.shape[-1] - 1).reshape(uniforms.shape)
    # Parallel prefix sums need not be monotone on accelerators: fall back to the mode in such a row.
    chosen = rows.gather(-1, ids.clamp(max=rows.shape[-1] - 1)[:, None])[:, 0]
    return torch.where(chosen > 0, ids, best_ids(rows)).reshape(uniforms.shape)


def _draw_narrow(rows: Tensor, uniforms: Tensor) -> Tensor:
    """Draw from `rows [R, V]` in one level. Needs prefix sums that are monotone, as CPUs' are."""
    cumulative = rows.cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1]
    # Strictly below the total, so that the first entry above the level always has a probability above 0.
    levels = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total))).clamp_(min=0)
    return torch.searchsorted(cumulative, levels[:, None], right=True)[:, 0].clamp_(max=rows.shape[-1] - 1)


def _block_sums(rows: Tensor) -> Tensor:
    """Return the mass of each `_DRAW_BLOCK` neighbouring ids, `[R, blocks]` float64, summed in the rows' precision."""
    whole = rows.shape[-1] // _DRAW_BLOCK * _DRAW_BLOCK
    sums = rows[:, :whole].unflatten(-1, (-1, _DRAW_BLOCK)).sum(-1)
    if whole < rows.shape[-1]:
        sums = torch.cat([sums, rows[:, whole:].sum(-1, keepdim=True)], -1)
    return sums.double()


def _locate(weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index `[R]` at which the cumulative `weights [R, n]` exceed `levels [R]`.

    The second value `[R]` is how far the level reaches into the weight at that index.
    """
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    # Strictly below the total, so that the first entry above the level always has a probability above 0.
    levels = torch.minimum(levels, torch.nextafter(total, torch.zeros_like(total))).clamp(min=0)
    place = torch.searchsorted(cumulative, levels[:, None], right=True).clamp(max=weights.shape[-1] - 1)
    before = cumulative.gather(-1, place) - weights.gather(-1, place)
    return place[:, 0], (levels[:, None] - before)[:, 0].clamp(min=0)
