"""Bounded optimum: the most tokens a second with every row's expected time per output token within a bound.

A row that is expected to emit l tokens in a step of T seconds has T / l a token. With bounds b the smallest product
b · l of a batch must not be below T. That product takes few values τ, one for each row and length. For each τ the rows
need at least the lengths that reach it, and the step may take τ: what is left is the best ratio above a floor and
within a budget.

Exact where a further token costs the same in every row. Elsewhere the bound holds, and goodput may fall short of the
optimum by about what one token gives: the rest of a budget that the next item does not fit (a knapsack's). In random
batches with contexts from 0 to 400 this lost nothing (`tests/unit/serving/control/test_bounded.py`).
"""

from __future__ import annotations

import numpy

from distillspec.serving.control.allocation import (
    Allocation,
    Batch,
    best_in,
    every_length,
    expected,
    order_at,
    plain,
    prices_of,
)
from distillspec.serving.costs.table import Floats

MOST_LEVELS = 48  # values of τ that are tried, evenly chosen where there are more


def violation(tokens: Floats, seconds: float, bounds: Floats) -> float:
    """Return the worst row's time per token over its bound, at most 1 if all hold. `tokens [n]` are expected ones."""
    return seconds / float((bounds * tokens).min(initial=numpy.inf))


def best_by_row_within(batch: Batch, bounds: Floats, free: Allocation) -> Allocation:
    """The lengths of highest goodput with T / l_i ≤ `bounds [n]` seconds a token for every row (infinity: none).

    Where that cannot be, the lengths whose worst row exceeds its bound by the smallest factor. `free` is what would be
    taken without bounds, priced as `batch` says.
    """
    tokens = row_tokens(batch)
    if violation(_at(tokens, free), free.seconds, bounds) <= 1:
        return free
    nothing, prices, products = plain(batch), prices_of(batch), bounds[:, None] * tokens
    reachable = products[:, -1].min()
    levels = numpy.unique(products[products <= reachable])
    if len(levels) > MOST_LEVELS:
        levels = levels[numpy.linspace(0, len(levels) - 1, MOST_LEVELS).round().astype(int)]
    least, smallest, best = nothing, numpy.inf, None
    for level in levels:
        floor = (products < level * (1 - 1e-12)).sum(1)
        found = expected(batch, floor)
        excess = violation(_at(tokens, found), found.seconds, bounds)
        if excess < smallest:
            least, smallest = found, excess
        if found.seconds > level:
            continue
        order = order_at(batch, prices, free.goodput, floor)
        for candidate in (found, best_in(batch, prices, nothing, order, int(floor.sum()), level)):
            if candidate is not None and (best is None or candidate.goodput > best.goodput):
                best = candidate
    return least if best is None else best


def best_for_all_within(batch: Batch, bounds: Floats, free: Allocation) -> Allocation:
    """The same with one length for all rows, by trying all."""
    tokens = row_tokens(batch)
    if violation(_at(tokens, free), free.seconds, bounds) <= 1:
        return free
    every = [(violation(_at(tokens, found), found.seconds, bounds), found) for found in every_length(batch)]
    within = [found for excess, found in every if excess <= 1]
    return max(within, key=lambda found: found.goodput) if within else min(every, key=lambda pair: pair[0])[1]


def row_tokens(batch: Batch) -> Floats:
    """Return the expected tokens of each row by length `[n, V + 1]`. Beyond a row's limit, those of the limit."""
    return numpy.cumsum(numpy.concatenate([numpy.ones((len(batch.limits), 1)), batch.gains], 1), 1)


def _at(tokens: Floats, allocation: Allocation) -> Floats:
    """Each row's expected tokens at its length."""
    return numpy.asarray(tokens[numpy.arange(len(tokens)), allocation.lengths])
