"""From logits to the distribution that tokens are drawn from, under a `SamplingPolicy`.

Training, evaluation and serving all call these functions, so that an acceptance rate measured in one
place means the same in another. Order of the transforms: temperature, top-k, top-p, min-p, each on the
renormalised result of the one before (as transformers does).

Functions with `look` ask the device about numbers: whether rows are distributions, and how many tokens a nucleus needs.
With `look=False` they read nothing: a row that defines no distribution gives numbers that mean nothing, and nuclei are
found by sorting whole rows. What sound rows give is the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.errors import ConfigError, RunError
from distillspec.types import SamplingPolicy

# A nucleus rarely holds more tokens than this; only rows where it does pay for looking further.
_NUCLEUS_PREFIX = 64
# Below this temperature scores are shifted before they are divided.
_COLDEST = 0.01
# The largest probabilities are looked for in blocks of so many ids, on CPUs.
_TOP_BLOCK = 32
# A draw looks for its block of so many ids first, then inside it: one cheap pass over the vocabulary.
_DRAW_BLOCK = 256


class NonFiniteLogits(RunError, ValueError):
    """Logits hold NaN, +inf, or no finite value in a row; the message names the owner and the row."""


def bad_row(logits: Tensor, first_position: int = 0) -> str | None:
    """Describe the first row of `logits [..., V]` that defines no distribution, or return None.

    Rows are counted from `first_position`.

    −inf is a zero probability and welcome; NaN, +inf and a row of nothing but −inf are not.
    """
    peaks = logits.detach().amax(-1)
    finite = torch.isfinite(peaks)
    if bool(finite.all()):
        return None
    row = int((~finite).flatten().nonzero()[0])
    peak = float(peaks.flatten()[row])
    what = "NaN" if math.isnan(peak) else "+inf" if peak > 0 else "no finite logit"
    return f"{what} at position {first_position + row}"


def check_logits(logits: Tensor, owner: str) -> None:
    """Raise `NonFiniteLogits`, naming `owner` and the first bad row, unless every row is a distribution."""
    problem = bad_row(logits)
    if problem is not None:
        raise NonFiniteLogits(f"{owner}: {problem}")


def check_policy(policy: SamplingPolicy) -> None:
    """Raise `ConfigError` for a policy that no sampler could follow."""
    if not (policy.temperature >= 0 and math.isfinite(policy.temperature)):
        raise ConfigError(f"temperature={policy.temperature} must be finite and >= 0 (0 is greedy)")
    if policy.top_k < 0:
        raise ConfigError(f"top_k={policy.top_k} must be >= 0 (0 switches it off)")
    if not 0 < policy.top_p <= 1:
        raise ConfigError(f"top_p={policy.top_p} must be in (0, 1] (1 switches it off)")
    if not 0 <= policy.min_p <= 1:
        raise ConfigError(f"min_p={policy.min_p} must be in [0, 1] (0 switches it off)")


def policy_probs(logits: Tensor, policy: SamplingPolicy, *, look: bool = True) -> Tensor:
    """Probabilities `[..., V]` float32 that `policy` draws from, given `logits [..., V]` of any dtype.

    Greedy gives a one-hot row at the argmax, the lowest id winning ties. Top-k keeps every token tied with
    the k-th (as transformers and vLLM do); top-p keeps the smallest set whose mass reaches p, lowest ids
    first among ties. Raises `NonFiniteLogits` (a ValueError) for NaN or +inf, `ConfigError` for the policy.
    """
    if policy.is_greedy:
        return _greedy_mask(logits, look).float()
    if policy.top_k == 0 and policy.min_p == 0.0 and policy.temperature >= _COLDEST and logits.dtype != torch.float64:
        probs = _warmed(logits, policy, look)
        return probs if policy.top_p == 1.0 else _normalised(_inside_nucleus(probs, policy.top_p, look))
    scaled = _scaled(logits, policy, look)
    if policy.top_p == 1.0:
        return torch.softmax(_above_min_p(scaled, policy), -1)
    kept = _inside_nucleus(torch.softmax(scaled, -1), policy.top_p, look)
    if policy.min_p > 0.0:
        kept.masked_fill_(scaled < math.log(policy.min_p), 0.0)
    return _normalised(kept)


def policy_logprobs(logits: Tensor, policy: SamplingPolicy) -> Tensor:
    """Logarithm of `policy_probs`, `[..., V]` float32 in nats; −inf where the probability is zero."""
    if policy.is_greedy:
        return torch.zeros_like(logits, dtype=torch.float32).masked_fill_(~_greedy_mask(logits, look=True), -torch.inf)
    return torch.log_softmax(filtered_logits(logits, policy), -1)


def filtered_logits(logits: Tensor, policy: SamplingPolicy, *, look: bool = True) -> Tensor:
    """Scores `[..., V]` float32 whose softmax is `policy_probs`: the maximum at 0, −inf where a filter removes.

    Not for greedy policies. Raises as `policy_probs`.
    """
    scaled = _scaled(logits, policy, look)
    if policy.top_p < 1.0:
        scaled.masked_fill_(~_nucleus_of(torch.softmax(scaled, -1), policy.top_p, look), -torch.inf)
    return _above_min_p(scaled, policy)


def _warmed(logits: Tensor, policy: SamplingPolicy, look: bool) -> Tensor:
    """Softmax at the policy's temperature, in as few passes over the vocabulary as it takes."""
    check_policy(policy)
    warm = logits.float() if policy.temperature == 1.0 else logits.float() / policy.temperature
    probs = torch.softmax(warm, -1)
    # A row that is no distribution is NaN throughout.
    if look and not bool(torch.isfinite(probs[..., 0]).all()):
        check_logits(logits, "sampling")
    return probs


def _scaled(logits: Tensor, policy: SamplingPolicy, look: bool) -> Tensor:
    """Scores under temperature and top-k, the maximum at 0; a tensor of its own."""
    check_policy(policy)
    peaks = logits.amax(-1, keepdim=True)
    if look and not bool(torch.isfinite(peaks).all()):
        check_logits(logits, "sampling")
    # Shifting first keeps tiny temperatures from overflowing.
    scaled = (logits - peaks).float() if logits.dtype == torch.float64 else logits.float() - peaks.float()
    if policy.temperature != 1.0:
        scaled /= max(policy.temperature, 1e-30)
    if 0 < policy.top_k < scaled.shape[-1]:
        smallest = scaled.topk(policy.top_k, -1).values[..., -1:]
        scaled.masked_fill_(scaled < smallest, -torch.inf)
    return scaled


def _above_min_p(scaled: Tensor, policy: SamplingPolicy) -> Tensor:
    """Min-p, in place: relative to the most probable token, whose score is 0."""
    if policy.min_p > 0.0:
        scaled.masked_fill_(scaled < math.log(policy.min_p), -torch.inf)
    return scaled


def _normalised(kept: Tensor) -> Tensor:
    """`kept [..., V]` divided by its sums; in place where no gradient passes."""
    sums = kept.sum(-1, keepdim=True)
    return kept / sums if kept.requires_grad else kept.div_(sums)


def _nucleus_of(probs: Tensor, top_p: float, look: bool) -> Tensor:
    """Bool `[..., V]`: the smallest set of the most probable tokens whose mass reaches `top_p`."""
    rows = probs.reshape(-1, probs.shape[-1])
    return (_nucleus(rows, top_p) if look else _nucleus_by_sorting(rows, top_p)).view(probs.shape)


def _inside_nucleus(probs: Tensor, top_p: float, look: bool) -> Tensor:
    """`probs [..., V]`, zero outside the nucleus; in place where no gradient passes."""
    if not look or probs.device.type != "cpu" or probs.requires_grad:
        return probs * _nucleus_of(probs, top_p, look)
    rows = probs.view(-1, probs.shape[-1])
    edges = _edges(rows, top_p)
    crowded = edges.crowded.nonzero()[:, 0]
    exact = rows[crowded] * edges.of(crowded).without_surplus(rows[crowded]) if len(crowded) else None
    # A threshold a row is six times as fast here as a mask. What equals the smallest kept probability stays.
    below = torch.nextafter(edges.smallest, torch.zeros_like(edges.smallest)).tolist()
    for row, edge in zip(rows, below, strict=True):
        torch.threshold_(row, edge, 0.0)
    if exact is not None:
        rows[crowded] = exact
    return probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Token ids `[...]` int64 by inverse CDF from `probs [..., V]` and `uniforms [...]` in [0, 1).

    Rows need not be normalised. The same row and uniform give the same id in any batch; an id of zero
    probability is never returned, not even for u = 0 or u = 1. Raises ValueError for a row without mass.
    """
    rows = probs.reshape(-1, probs.shape[-1])
    sums = _block_sums(rows)
    total = sums.sum(-1)
    if not bool(((total > 0) & torch.isfinite(total)).all()):
        raise ValueError("draw: a row of probabilities sums to zero or is not finite")
    return _draw(rows, sums, uniforms)


def best_ids(logits: Tensor) -> Tensor:
    """`logits [..., V]`'s argmax `[...]` int64: the lowest of equal ids, and a NaN's where there is one.

    On CPUs by blocks: torch finds maxima there five times as fast as their places.
    """
    whole = logits.shape[-1] // _DRAW_BLOCK * _DRAW_BLOCK
    if logits.device.type != "cpu" or whole == 0:
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
    """As `draw`, without asking the device whether rows have mass: one that has none gives some id."""
    rows = probs.reshape(-1, probs.shape[-1])
    return _draw(rows, _block_sums(rows), uniforms)


def draw_each(probs: Tensor, uniforms: Tensor) -> Tensor:
    """As `draw_unchecked`, m independent draws `[R, m]` from each row of `probs [R, V]` in one pass over it."""
    sums = _block_sums(probs)
    return torch.stack([_draw(probs, sums, column) for column in uniforms.unbind(-1)], -1)


def _draw(rows: Tensor, sums: Tensor, uniforms: Tensor) -> Tensor:
    levels = uniforms.reshape(-1).double().clamp(0, 1)
    block, rest = _locate(sums, levels * sums.sum(-1))
    places = block[:, None] * _DRAW_BLOCK + torch.arange(_DRAW_BLOCK, device=rows.device)
    inside = rows.gather(-1, places.clamp(max=rows.shape[-1] - 1)).double() * (places < rows.shape[-1])
    ids = block * _DRAW_BLOCK + _locate(inside, rest)[0]
    # Parallel prefix sums need not be monotone on accelerators: fall back to the mode in such a row.
    chosen = rows.gather(-1, ids.clamp(max=rows.shape[-1] - 1)[:, None])[:, 0]
    return torch.where(chosen > 0, ids, best_ids(rows)).reshape(uniforms.shape)


def _block_sums(rows: Tensor) -> Tensor:
    """Mass of each `_DRAW_BLOCK` neighbouring ids, `[R, blocks]` float64: one pass in the rows' own precision."""
    whole = rows.shape[-1] // _DRAW_BLOCK * _DRAW_BLOCK
    sums = rows[:, :whole].unflatten(-1, (-1, _DRAW_BLOCK)).sum(-1)
    if whole < rows.shape[-1]:
        sums = torch.cat([sums, rows[:, whole:].sum(-1, keepdim=True)], -1)
    return sums.double()


def _locate(weights: Tensor, levels: Tensor) -> tuple[Tensor, Tensor]:
    """The first place where the cumulative `weights [R, n]` exceed `levels [R]`, and how far the level is into it."""
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1]
    # Strictly below the total, so that the first entry above the level always adds mass of its own.
    levels = torch.minimum(levels, torch.nextafter(total, torch.zeros_like(total))).clamp(min=0)
    place = torch.searchsorted(cumulative, levels[:, None], right=True).clamp(max=weights.shape[-1] - 1)
    before = cumulative.gather(-1, place) - weights.gather(-1, place)
    return place[:, 0], (levels[:, None] - before)[:, 0].clamp(min=0)


def _greedy_mask(logits: Tensor, look: bool) -> Tensor:
    if look:
        check_logits(logits, "greedy sampling")
    best = best_ids(logits)[..., None]
    return torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, best, True)


@dataclass(frozen=True)
class _Edges:
    """Where the nuclei of R rows end."""

    smallest: Tensor  # [R] float32, the smallest probability inside
    count: Tensor  # [R] int64, how many tokens are inside
    crowded: Tensor  # [R] bool: more tokens than have room may equal the smallest

    def of(self, rows: Tensor) -> _Edges:
        """Those of some rows."""
        return _Edges(self.smallest[rows], self.count[rows], self.crowded[rows])

    def without_surplus(self, probs: Tensor) -> Tensor:
        """Bool `[R, V]`, the nuclei of `probs [R, V]`: of tokens tied with the smallest, the lowest ids stay."""
        above, tied = probs > self.smallest[:, None], probs == self.smallest[:, None]
        room = self.count[:, None] - above.sum(-1, keepdim=True)
        return above | (tied & (tied.cumsum(-1) <= room))


def _nucleus(probs: Tensor, top_p: float, prefix: int = _NUCLEUS_PREFIX) -> Tensor:
    """Bool `[R, V]`: the smallest set of the most probable tokens whose mass reaches `top_p`."""
    edges = _edges(probs, top_p, prefix)
    keep = probs >= edges.smallest[:, None]
    if bool(edges.crowded.any()):
        keep[edges.crowded] = edges.of(edges.crowded).without_surplus(probs[edges.crowded])
    return keep


def _edges(probs: Tensor, top_p: float, prefix: int = _NUCLEUS_PREFIX) -> _Edges:
    """Where the nuclei of `probs [R, V]` end, looked for among the `prefix` most probable tokens first."""
    if prefix >= probs.shape[-1]:
        return _edges_among(probs.sort(-1, descending=True).values, top_p)
    largest = _largest(probs, prefix)
    longer = largest.sum(-1, dtype=torch.float64) < top_p
    if not bool(longer.any()):
        return _edges_among(largest, top_p)
    edges, more = _edges_among(largest, top_p), _edges(probs[longer], top_p, prefix=8 * prefix)
    for mine, theirs in zip(vars(edges).values(), vars(more).values(), strict=True):
        mine[longer] = theirs
    return edges


def _edges_among(largest: Tensor, top_p: float) -> _Edges:
    """Edges from the most probable tokens' probabilities `[R, n]`, descending, that hold `top_p`."""
    mass_before = largest.double().cumsum(-1) - largest
    count = (mass_before < top_p).sum(-1).clamp(min=1)
    smallest = largest.gather(-1, count[:, None] - 1)
    # There may be more tied tokens than the prefix shows.
    crowded = ((largest >= smallest).sum(-1) > count) | (largest[:, -1:] >= smallest)[:, 0]
    return _Edges(smallest[:, 0], count, crowded)


def _largest(rows: Tensor, count: int) -> Tensor:
    """The `count` largest of each row `[R, V]`, descending, as `topk` gives them.

    On CPUs only in the blocks with the largest maxima, which hold them all: torch sorts there what it looks through.
    """
    blocks = rows.shape[-1] // _TOP_BLOCK
    if rows.device.type != "cpu" or blocks <= 2 * count:
        return rows.topk(count, -1).values
    split = rows[:, : blocks * _TOP_BLOCK].unflatten(-1, (blocks, _TOP_BLOCK))
    best = split.amax(-1).topk(count, -1, sorted=False).indices
    inside = split.gather(1, best[..., None].expand(-1, -1, _TOP_BLOCK)).flatten(1)
    return torch.cat([inside, rows[:, blocks * _TOP_BLOCK :]], -1).topk(count, -1).values


def _nucleus_by_sorting(probs: Tensor, top_p: float) -> Tensor:
    """`_nucleus` with no question to the device; a stable sort leaves the lowest of tied ids first."""
    largest, order = torch.sort(probs, dim=-1, descending=True, stable=True)
    count = ((largest.double().cumsum(-1) - largest) < top_p).sum(-1, keepdim=True).clamp(min=1)
    inside = torch.arange(probs.shape[-1], device=probs.device) < count
    return torch.zeros_like(probs, dtype=torch.bool).scatter_(-1, order, inside)
