"""Nucleus (top-p) of a distribution: the smallest set of the most probable tokens whose mass reaches p.

Among tokens of equal probability the lowest ids are inside.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A nucleus rarely holds more tokens than this. Only rows whose nucleus does are searched further.
_PREFIX = 64
# Ids in a block. On CPUs the largest probabilities are searched block by block.
_TOP_BLOCK = 32
_BITS_OF_ONE = 0x3F800000  # of 1.0 as a float32


def nucleus_mask(probs: Tensor, top_p: float, reads_are_free: bool) -> Tensor:
    """Return the nucleus as a mask, bool `[..., V]`, of `probs [..., V]`."""
    rows = probs.reshape(-1, probs.shape[-1])
    return (mask_nucleus(rows, top_p) if reads_are_free else _mask_by_bisection(rows, top_p)).view(probs.shape)


def keep_nucleus(probs: Tensor, top_p: float, reads_are_free: bool) -> Tensor:
    """Return `probs [..., V]` with zeros outside the nucleus. Works in place on CPUs if no gradient passes."""
    if not reads_are_free or probs.device.type != "cpu" or probs.requires_grad:
        return probs * nucleus_mask(probs, top_p, reads_are_free)
    rows = probs.view(-1, probs.shape[-1])
    edges = _edges(rows, top_p)
    # One threshold a row is six times as fast here as a mask. Probabilities equal to the smallest inside stay.
    below = torch.nextafter(edges.smallest, torch.zeros_like(edges.smallest)).tolist()
    for row, edge in zip(rows, below, strict=True):
        torch.threshold_(row, edge, 0.0)
    for r in edges.crowded.nonzero()[:, 0].tolist():  # many, for logits of bfloat16 often tie
        inside = rows[r].nonzero()[:, 0]
        tied = inside[rows[r][inside] == edges.smallest[r]]
        surplus = len(inside) - int(edges.count[r])
        rows[r].index_fill_(0, tied[len(tied) - surplus :], 0.0)
    return probs


@dataclass(frozen=True)
class _Edges:
    """Ends of the nuclei of R rows."""

    smallest: Tensor  # [R] float32, the smallest probability inside
    count: Tensor  # [R] int64, how many tokens are inside
    crowded: Tensor  # [R] bool: some tokens that equal the smallest may have to stay outside

    def of(self, rows: Tensor) -> _Edges:
        """Return the edges of some rows."""
        return _Edges(self.smallest[rows], self.count[rows], self.crowded[rows])

    def without_surplus(self, probs: Tensor) -> Tensor:
        """Return the nuclei of `probs [R, V]` as bool `[R, V]`. Of tokens equal to the smallest the lowest ids stay."""
        above, tied = probs > self.smallest[:, None], probs == self.smallest[:, None]
        room = self.count[:, None] - above.sum(-1, keepdim=True)
        return above | (tied & (tied.cumsum(-1) <= room))


def mask_nucleus(probs: Tensor, top_p: float, prefix: int = _PREFIX) -> Tensor:
    """Return the nuclei of `probs [R, V]` as bool `[R, V]`."""
    edges = _edges(probs, top_p, prefix)
    keep = probs >= edges.smallest[:, None]
    if bool(edges.crowded.any()):
        keep[edges.crowded] = edges.of(edges.crowded).without_surplus(probs[edges.crowded])
    return keep


def _edges(probs: Tensor, top_p: float, prefix: int = _PREFIX) -> _Edges:
    """Return the ends of the nuclei of `probs [R, V]`, searched among the `prefix` most probable tokens first."""
    if prefix >= probs.shape[-1]:
        return _edges_among(probs.sort(-1, descending=True).values, top_p)
    largest = largest_probs(probs, prefix)
    longer = largest.sum(-1, dtype=torch.float64) < top_p
    if not bool(longer.any()):
        return _edges_among(largest, top_p)
    rest = probs.index_select(0, longer.nonzero()[:, 0])  # a mask would copy number by number
    edges, more = _edges_among(largest, top_p), _edges(rest, top_p, prefix=8 * prefix)
    for mine, theirs in zip(vars(edges).values(), vars(more).values(), strict=True):
        mine[longer] = theirs
    return edges


def _edges_among(largest: Tensor, top_p: float) -> _Edges:
    """Return the edges within `largest [R, n]`, the largest probabilities in descending order."""
    mass_before = largest.double().cumsum(-1) - largest
    count = (mass_before < top_p).sum(-1).clamp(min=1)
    smallest = largest.gather(-1, count[:, None] - 1)
    # The prefix may end within a run of equal probabilities.
    crowded = ((largest >= smallest).sum(-1) > count) | (largest[:, -1:] >= smallest)[:, 0]
    return _Edges(smallest[:, 0], count, crowded)


def largest_probs(rows: Tensor, count: int) -> Tensor:
    """Return the `count` largest values of each row `[R, V]` in descending order, as `topk` does.

    CPUs search only the blocks with the largest maxima, which hold them all: torch sorts there all that it searches.
    """
    blocks = rows.shape[-1] // _TOP_BLOCK
    if rows.device.type != "cpu" or blocks <= 2 * count:
        return rows.topk(count, -1).values
    split = rows[:, : blocks * _TOP_BLOCK].unflatten(-1, (blocks, _TOP_BLOCK))
    best = split.amax(-1).topk(count, -1, sorted=False).indices
    inside = split.gather(1, best[..., None].expand(-1, -1, _TOP_BLOCK)).flatten(1)
    return torch.cat([inside, rows[:, blocks * _TOP_BLOCK :]], -1).topk(count, -1).values


def _mask_by_bisection(probs: Tensor, top_p: float) -> Tensor:
    """Return what `mask_nucleus` does without a device sync or a sort.

    The smallest probability inside is the smallest number above which there is less mass than `top_p`. Bits of positive
    floats are ordered as the floats are, so it is found among whole numbers.
    """
    low = torch.zeros(len(probs), 1, dtype=torch.int32, device=probs.device)
    high = torch.full_like(low, _BITS_OF_ONE)
    for _ in range(_BITS_OF_ONE.bit_length()):
        middle = (low + high) // 2
        enough = _mass_above(probs, middle.view(torch.float32)) < top_p
        low, high = torch.where(enough, low, middle + 1), torch.where(enough, middle, high)
    smallest = high.view(torch.float32)
    room = ((top_p - _mass_above(probs, smallest)) / smallest).ceil().clamp(min=1)
    tied = probs == smallest
    return (probs > smallest) | (tied & (tied.cumsum(-1) <= room))


def _mass_above(probs: Tensor, edges: Tensor) -> Tensor:
    """Return the mass `[R, 1]` float64 of probabilities above `edges [R, 1]`."""
    return torch.where(probs > edges, probs, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
