"""Bounded optimum: the most tokens a second with every row's expected time per output token within a bound.

A row that is expected to emit l tokens in a step of T seconds has T / l a token. With bounds b the smallest product
b · l of a batch must not be below T. That product takes few values τ, one for each row and length. For each τ the rows
need at least the lengths that reach it, and the step may take τ: what is left is the best ratio above a floor and
within a budget. It is exact where a further token costs the same in every row. Elsewhere the bound holds, and goodput
may fall short by about what one token gives (a knapsack's rest).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy

from distillspec.serving.base.rows import RowView
from distillspec.serving.control.allocation import (
    Allocation,
    Batch,
    best_in,
    every_length,
    expected,
    order_at,
    row_tokens,
)
from distillspec.serving.costs.table import Floats

MOST_LEVELS = 48  # values of τ that are tried, evenly chosen where there are more
WITHIN = 1 + 1e-9  # of a bound


def bounds_of(rows: Sequence[RowView], of_all: float | None) -> Floats | None:
    """Return the bound on seconds a token of each row, its own or that of all. None: without any, infinity: for one."""
    own = [row.max_time_per_token_s or of_all for row in rows]
    return numpy.array([bound or numpy.inf for bound in own]) if any(own) else None


def best_within(
    batch: Batch, bounds: Floats, planned: Allocation, price: float, further_s: float = 0.0, *, alike: bool = False
) -> tuple[Allocation, float]:
    """Return the lengths of highest goodput with T / l_i ≤ `bounds [n]` s a token for every row, and their excess.

    The excess is the worst row's time per token over its bound. Where no lengths keep the bounds, those of the smallest
    excess are returned.

    Args:
        batch: rows and costs.
        bounds: infinity: none.
        planned: kept if it keeps the bounds.
        price: tokens a second of the best lengths without bounds.
        further_s: seconds of the step, whatever is drafted.
        alike: one length for all rows.
    """
    products, rows = bounds[:, None] * row_tokens(batch), numpy.arange(len(bounds))

    def excess(one: Allocation) -> float:
        return (one.seconds + further_s) / float(products[rows, one.lengths].min(initial=numpy.inf))

    if excess(planned) <= WITHIN:
        return planned, excess(planned)
    every = every_length(batch) if alike or len(bounds) == 1 else list(_above_floors(batch, products, price, further_s))
    kept = [one for one in every if excess(one) <= WITHIN]
    found = max(kept, key=lambda one: one.goodput) if kept else min(every, key=excess)
    return found, excess(found)


def _above_floors(batch: Batch, products: Floats, price: float, further_s: float) -> Iterator[Allocation]:
    """For each τ, the lengths that reach it, and the best ones above them within τ seconds."""
    levels = numpy.unique(products[products <= products[:, -1].min()])
    if len(levels) > MOST_LEVELS:
        levels = levels[numpy.linspace(0, len(levels) - 1, MOST_LEVELS).round().astype(int)]
    floors = (products < levels[:, None, None] * (1 - 1e-12)).sum(2)
    for level, least in zip(levels.tolist(), expected(batch, floors), strict=True):
        yield least
        if least.seconds + further_s <= level:
            order = order_at(batch, price, least.lengths)
            best = best_in(batch, order, int(least.lengths.sum()), level - further_s)
            if best is not None:
                yield best
