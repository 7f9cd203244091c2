"""Bounded optimum: the most tokens a second with every row's expected time per output token within a bound.

A row that is expected to emit l tokens in a step of T seconds has T / l a token. With bounds b the smallest product
b · l of a batch must not be below T. That product takes few values τ, one for each row and length. For each τ the rows
need at least the lengths that reach it, and the step may take τ: further tokens are added by their chances, to those τ
whose least lengths are fast enough. It is exact where a further token costs the same in every row. Elsewhere the bound
holds, and goodput may fall short by about what one token gives (a knapsack's rest). Where there are many rows, not
every τ is tried, and several tokens are added at once: it would take too long.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy

from distillspec.serving.base.rows import RowView
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.types import Floats, Ints

MOST_LEVELS = 512  # values of τ that are tried, evenly chosen where there are more
MOST_KEPT = 48  # of them that further tokens are added to, evenly chosen too
MOST_FURTHER = 64  # numbers of likeliest tokens that are tried for each, evenly chosen too
KEPT_EXCESS = 1 + 1e-9  # time per token over its bound, up to which this is kept
Numbers = TypeVar("Numbers", Floats, Ints)


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
    alike = alike or len(bounds) == 1
    lengths = batch.alike if alike else _floors(products)
    excess, goodput = judged(lengths)
    if not alike and (kept := excess <= KEPT_EXCESS).any():
        lengths = _with_further(batch, _evenly(lengths[kept], MOST_KEPT))
        excess, goodput = judged(lengths)
    kept = excess <= KEPT_EXCESS
    best = int(numpy.where(kept, goodput, -numpy.inf).argmax() if kept.any() else excess.argmin())
    return lengths[best], float(excess[best])


def _floors(products: Floats) -> Ints:
    """Return for each τ the least lengths that reach it `[levels, n]`."""
    levels = _evenly(numpy.unique(products[products <= products[:, -1].min()]), MOST_LEVELS)
    return (products < levels[:, None, None] * (1 - 1e-12)).sum(2)


def _evenly(values: Numbers, most: int) -> Numbers:
    """Return at most so many of the values `[m, …]`, the first and the last among them."""
    return values[numpy.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)]


def _with_further(batch: ChainBatch, floors: Ints) -> Ints:
    """Return lengths `[m, n]` that hold `floors [levels, n]`, and beside them the likeliest tokens of all rows."""
    chances = batch.survival.ravel()
    likeliest = (-chances).argsort(kind="stable")[: numpy.count_nonzero(chances)] // batch.survival.shape[1]  # rows
    counts = numpy.unique(numpy.linspace(0, len(likeliest), MOST_FURTHER + 1).astype(int))
    reached = (likeliest[:, None] == numpy.arange(len(batch.limits))).cumsum(0)  # tokens of each row by their number
    reached = numpy.concatenate([numpy.zeros_like(floors[:1]), reached])[counts]
    return numpy.maximum(floors[:, None], reached).reshape(-1, len(batch.limits))
