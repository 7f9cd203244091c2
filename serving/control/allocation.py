"""Which lengths give the most tokens a second, for survival probabilities and costs: exact, for every batch.

A draft pass is paid once a depth, whatever the rows; every drafted token costs a place in its row's pass and one in
the target's. So for a given deepest pass D the fixed costs are known, and what is left is a set of (row, depth) items
with a gain (the probability that the token is emitted) and a cost. The best *ratio* takes items in order of gain by
cost while that exceeds the ratio so far; survival never rises with depth, so a row's items are taken from the first on.
The best D follows by trying all. (Adding the best marginal row while goodput rises is not optimal: the first row alone
may not pay for a pass that two rows pay for.)

Experts of a mixture cost by the *number* of tokens verified, less for each further one, so no fixed order of items is
right at once. For a given price λ of a second the best set is (items by gain − λ · cost, each count tried), and raising
λ to the ratio of the set found until nothing changes gives the best ratio (Dinkelbach 1967): exact as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from distillspec.serving.control.latency import LatencyModel

Floats = NDArray[numpy.float64]
Ints = NDArray[numpy.int64]


class Allocation(NamedTuple):
    """Lengths by row, and what they are expected to give: tokens (bonus included) and seconds."""

    lengths: Ints
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


def best_by_row(
    survival: Floats, limits: Ints, contexts: Ints, latency: LatencyModel, prefill_tokens: int = 0
) -> Allocation:
    """The lengths of highest goodput, each row its own.

    Args:
        survival: `[n, V]`, P(the first 1 … V drafted tokens of row i all stand); never rising along a row.
        limits: `[n]`, the most each row may draft.
        contexts: `[n]`, tokens of each row in the cache.
        prefill_tokens: prompt tokens read in the same step.
    """
    rows, deepest = survival.shape
    plain = expected(numpy.zeros_like(limits), survival, limits, contexts, latency, prefill_tokens)
    if rows == 0 or deepest == 0:
        return plain
    if latency.target.per_expert:
        return _best_with_experts(survival, limits, contexts, latency, prefill_tokens, plain)
    depth = numpy.arange(1, deepest + 1)
    gain = numpy.where(depth <= limits[:, None], survival, 0.0).ravel()
    cost = numpy.repeat(_costs(contexts, latency), deepest)
    density = gain / numpy.maximum(cost, 1e-12)
    order = numpy.argsort(-density, kind="stable")
    gain, cost, depths = gain[order], cost[order], numpy.tile(depth, rows)[order]
    within = depths <= depth[:, None]  # [D, items]
    tokens = plain.tokens + numpy.cumsum(gain * within, 1)
    seconds = plain.seconds + _fixed(depth, latency)[:, None] + numpy.cumsum(cost * within, 1)
    best = int(numpy.argmax(tokens / seconds))
    d, last = divmod(best, len(gain))
    if tokens[d, last] / seconds[d, last] <= plain.goodput:
        return plain
    taken = order[: last + 1][within[d, : last + 1] & (gain[: last + 1] > 0)]
    return Allocation(numpy.bincount(taken // deepest, minlength=rows), float(tokens[d, last]), float(seconds[d, last]))


def _best_with_experts(
    survival: Floats, limits: Ints, contexts: Ints, latency: LatencyModel, prefill_tokens: int, plain: Allocation
) -> Allocation:
    """Dinkelbach's iteration from plain decoding up; each round is the best set at the price so far."""
    rows, deepest = survival.shape
    depth = numpy.arange(1, deepest + 1)
    allowed = depth <= limits[:, None]
    cost = _costs(contexts, latency)[:, None]
    beside = prefill_tokens if latency.prefill is None else 0
    tokens = len(limits) + beside + numpy.arange(rows * deepest + 1, dtype=numpy.float64)
    experts_s = latency.target.per_expert * latency.target.loaded_experts(tokens)  # by drafted tokens
    best = plain
    while True:
        value = numpy.where(allowed, survival - best.goodput * cost, -numpy.inf).ravel()
        order = numpy.argsort(-value, kind="stable")
        depths = numpy.tile(depth, rows)[order]
        within = (depths <= depth[:, None]) & (value[order] > -numpy.inf)  # [D, items]
        worth = numpy.cumsum(numpy.where(within, value[order], 0.0), 1)
        worth -= best.goodput * (experts_s[numpy.cumsum(within, 1)] + _fixed(depth, latency)[:, None])
        d, last = divmod(int(numpy.argmax(worth)), len(order))
        taken = order[: last + 1][within[d, : last + 1]]
        lengths = numpy.bincount(taken // deepest, minlength=rows)
        found = expected(lengths, survival, limits, contexts, latency, prefill_tokens)
        if found.goodput <= best.goodput * (1 + 1e-12):
            return best
        best = found


def best_for_all(
    survival: Floats, limits: Ints, contexts: Ints, latency: LatencyModel, prefill_tokens: int = 0
) -> Allocation:
    """The best single length for all rows (each cut to its limit), by trying all."""
    rows, deepest = survival.shape
    plain = expected(numpy.zeros_like(limits), survival, limits, contexts, latency, prefill_tokens)
    best = plain
    for length in range(1, deepest + 1 if rows else 0):
        found = expected(numpy.minimum(limits, length), survival, limits, contexts, latency, prefill_tokens)
        best = max(best, found, key=lambda allocation: allocation.goodput)
    return best


def expected(
    lengths: Ints, survival: Floats, limits: Ints, contexts: Ints, latency: LatencyModel, prefill_tokens: int = 0
) -> Allocation:
    """What given `lengths [n]` (within the limits) give."""
    drafted = numpy.arange(1, survival.shape[1] + 1) <= lengths[:, None]
    seconds = latency.step_s(contexts.tolist(), lengths.tolist(), prefill_tokens)
    return Allocation(lengths, len(limits) + float((survival * drafted).sum()), max(seconds, 1e-9))


def _costs(contexts: Ints, latency: LatencyModel) -> Floats:
    """Seconds that one more drafted token of each row costs, beside the fixed cost of its pass."""
    costs = numpy.full(len(contexts), latency.target.per_token)
    if latency.draft is not None:
        costs += latency.draft.per_token + latency.draft.per_context * contexts
    return costs


def _fixed(depth: Ints, latency: LatencyModel) -> Floats:
    """Seconds that drafting to each depth costs whatever the rows."""
    if latency.draft is None:
        return numpy.full(len(depth), latency.draft_free_s)
    return depth.astype(numpy.float64) * latency.draft.fixed
