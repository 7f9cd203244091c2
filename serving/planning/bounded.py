"""Bounded optimum: the most tokens a second with every row's expected time per output token within a bound.

A row that is expected to emit l tokens in a step of T seconds has T / l a token. With bounds b the smallest product
b · l of a batch must not be below T. That product takes few values τ, one for each row and length. For each τ the rows
need at least the lengths that reach it, and the step may take τ: further tokens are added by their chances. It is exact
where a further token costs the same in every row. Elsewhere the bound holds, and goodput may fall short by about what
one token gives (a knapsack's rest). Many rows add several tokens at once, for time's sake.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.serving.base.rows import RowView
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.types import Floats, Ints

MOST_LEVELS = 48  # values of τ that are tried, evenly chosen where there are more
MOST_FURTHER = 64  # numbers of further tokens that are tried for each, evenly chosen too
KEPT_EXCESS = 1 + 1e-9  # time per token over its bound, up to which this is kept


def bounds_of(rows: Sequence[RowView], of_all: float | None) -> Floats | None:
    """Return the bound on seconds a token of each row, its own or that of all. None: without any, infinity: for one."""
    bounds = [row.max_time_per_token_s or of_all for row in rows]
    return numpy.array([bound or numpy.inf for bound in bounds]) if any(bounds) else None


def best_within(
    batch: ChainBatch, bounds: Floats, planned: Ints, further_s: float = 0.0, *, alike: bool = False
) -> tuple[Ints, float]:
    """Return the lengths `[n]` of highest goodput with T / l_i ≤ `bounds [n]` s a token in every row, and their excess.

    The excess is the worst row's time per token over its bound. Where no lengths keep the bounds, those of the smallest
    excess are returned.

    Args:
        batch: rows and costs.
        bounds: infinity: none.
        planned: `[n]`, kept if they keep the bounds.
        further_s: seconds of the step, whatever is drafted.
        alike: one length for all rows.
    """
    products = bounds[:, None] * batch.row_tokens
    rows = numpy.arange(len(bounds))

    def judged(lengths: Ints) -> tuple[Floats, Floats]:
        """Return the excess of lengths `[m, n]`, and their goodput."""
        seconds, goodput = numpy.array([(each.seconds, each.goodput) for each in batch.expected(lengths)]).T
        return (seconds + further_s) / products[rows, lengths].min(1, initial=numpy.inf), goodput

    excess, _ = judged(planned[None])
    if excess[0] <= KEPT_EXCESS:
        return planned, float(excess[0])
    lengths = batch.alike if alike or len(bounds) == 1 else _above_floors(batch, products)
    excess, goodput = judged(lengths)
    kept = excess <= KEPT_EXCESS
    best = int(numpy.where(kept, goodput, -numpy.inf).argmax() if kept.any() else excess.argmin())
    return lengths[best], float(excess[best])


def _above_floors(batch: ChainBatch, products: Floats) -> Ints:
    """Return for each τ the lengths that reach it, and these with the likeliest further tokens, one after another."""
    levels = numpy.unique(products[products <= products[:, -1].min()])
    if len(levels) > MOST_LEVELS:
        levels = levels[numpy.linspace(0, len(levels) - 1, MOST_LEVELS).round().astype(int)]
    floors = (products < levels[:, None, None] * (1 - 1e-12)).sum(2)
    likeliest = (-batch.survival).argsort(axis=None, kind="stable")[: numpy.count_nonzero(batch.survival)]
    row, depth = numpy.divmod(likeliest, batch.survival.shape[1])
    further = (row == numpy.arange(len(floors.T))[:, None])[None] & (depth >= floors[..., None])  # [levels, n, items]
    begins = numpy.unique(numpy.linspace(0, len(likeliest), MOST_FURTHER, endpoint=False).astype(int))
    added = numpy.add.reduceat(further, begins[: len(likeliest)], 2, dtype=numpy.int64)
    longer = floors[..., None] + added.cumsum(2)
    every = numpy.concatenate([floors[..., None], longer], 2)
    return numpy.unique(every.transpose(0, 2, 1).reshape(-1, len(floors.T)), axis=0)
