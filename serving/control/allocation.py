"""Optimal lengths: the most tokens a second for given survival probabilities and costs.

Each drafted token is an item with a gain, the probability that it is emitted. Survival never rises with depth, so a
row's items are taken from the first on. What a set of items costs follows from the number of items (the target's pass),
the deepest one (draft passes), and which rows they are of (the context that the draft reads). So for a given price of a
second and a deepest item the best sets are those with the highest gain less their row's cost at that price, and each
number of them is tried. The ratio found is the next price (Dinkelbach 1967). The optimum is exact where a draft pass
costs a line by its rows, and a row of little loss else: the line through its costs of one row and of all is taken.
Rows whose drafts come without a model pay for no pass; with them there are two cases for each depth.

Prompt tokens read in the same step cost the same whatever is drafted, so their time is in no allocation. They are only
counted as tokens of the target's pass, where they may make each further token dearer.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import Floats

LEAST_S = 1e-9
NEARLY = 1 + 1e-12
Ints = NDArray[numpy.int64]
Bools = NDArray[numpy.bool_]


class Allocation(NamedTuple):
    """Lengths by row, and what they are expected to give: tokens (bonus included) and seconds."""

    lengths: Ints
    tokens: float
    seconds: float

    @property
    def goodput(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


class Batch(NamedTuple):
    """Rows, survival and costs that lengths are chosen for.

    survival: `[n, V]`, P(the first 1 … V drafted tokens of row i all stand); never rising along a row.
    limits: `[n]`, the most each row may draft.
    contexts: `[n]`, tokens of each row in the cache.
    prefill_tokens: prompt tokens in the target's pass.
    by_model: `[n]`, False where a row's drafts come without the draft model; None: as `latency` has a draft or not.
    further_s: seconds that every allocation takes besides.
    price: tokens a second that the search starts from, such as the last step's best. 0: those of plain decoding.
    """

    survival: Floats
    limits: Ints
    contexts: Ints
    latency: LatencyModel
    prefill_tokens: int = 0
    by_model: Bools | None = None
    further_s: float = 0.0
    price: float = 0.0

    @property
    def gains(self) -> Floats:
        """The expected tokens of each item `[n, V]`, 0 beyond a row's limit."""
        if (self.limits >= self.survival.shape[1]).all():
            return self.survival
        return numpy.where(numpy.arange(self.survival.shape[1]) < self.limits[:, None], self.survival, 0.0)


class Prices(NamedTuple):
    """Seconds that drafted items add to a plain step."""

    by_count: Floats  # to the target's pass, by the number of items from 0 on
    least: float  # for one more item to the target's pass, whatever the number
    item: Floats  # `[n]`, to draft passes, for an item of each row
    draft_pass: float  # for each draft pass
    model: Bools  # `[n]`, which rows take part in draft passes


def best_by_row(batch: Batch) -> Allocation:
    """The lengths of highest goodput, each row its own."""
    best = nothing = plain(batch)
    if not batch.limits.any() or not batch.survival.size:
        return nothing
    if len(batch.limits) == 1:
        return _best_of_one(batch, nothing)
    prices, price = prices_of(batch), batch.price or nothing.goodput
    before = numpy.array([-1])  # no order
    while not numpy.array_equal(order := order_at(batch, prices, price), before):
        found = best_in(batch, prices, nothing, order)
        if found is not None and found.goodput > best.goodput * NEARLY:
            best = found
        elif price == best.goodput:
            break
        price, before = best.goodput, order
    draft = batch.latency.draft
    exact = expected(batch, best.lengths) if draft is not None and len(draft.knots) > 2 else best
    return exact if exact.goodput > nothing.goodput else nothing


def _best_of_one(batch: Batch, nothing: Allocation) -> Allocation:
    """A single row: all lengths in turn, in plain numbers, since arrays of a few are slower."""
    latency, context, read = batch.latency, int(batch.contexts[0]), 1 + batch.prefill_tokens
    draft = latency.draft if batch.by_model is None or bool(batch.by_model[0]) else None
    a_pass_s = 0.0 if draft is None else draft.seconds(context, 1, 1)
    once_s = nothing.seconds - latency.target.seconds(0, read) + latency.draft_free_s * (draft is None)
    best, tokens = nothing, 1.0
    for length, survives in enumerate(batch.survival[0, : int(batch.limits[0])].tolist(), 1):
        tokens += survives
        seconds = max(once_s + latency.target.seconds(0, read + length) + a_pass_s * length, LEAST_S)
        if tokens / seconds > best.goodput:
            best = Allocation(numpy.array([length]), tokens, seconds)
    return best


def best_for_all(batch: Batch) -> Allocation:
    """The best single length for all rows (each cut to its limit), by trying all."""
    return max(every_length(batch), key=lambda allocation: allocation.goodput)


def every_length(batch: Batch) -> list[Allocation]:
    """Return the allocations of each single length for all rows, from 0 on."""
    nothing, prices = plain(batch), prices_of(batch)
    depth = numpy.arange(1, min(batch.survival.shape[1], int(batch.limits.max(initial=0))) + 1)
    lengths = numpy.minimum(batch.limits, depth[:, None])  # [longest, n]
    tokens = nothing.tokens + batch.gains[:, : len(depth)].sum(0).cumsum()
    seconds = nothing.seconds + prices.by_count[lengths.sum(1)] + lengths @ prices.item
    seconds += prices.draft_pass * (lengths * prices.model).max(1, initial=0)
    seconds += batch.latency.draft_free_s * (lengths * ~prices.model).any(1)
    found = zip(lengths, tokens.tolist(), seconds.tolist(), strict=True)
    return [nothing, *(Allocation(*one) for one in found)]


def plain(batch: Batch) -> Allocation:
    """Return the allocation without speculation."""
    rows = len(batch.limits)
    seconds = batch.latency.target.seconds(float(batch.contexts.sum()), rows, rows) + batch.further_s
    return Allocation(numpy.zeros(rows, dtype=numpy.int64), float(rows), max(seconds, LEAST_S))


def expected(batch: Batch, lengths: Ints) -> Allocation:
    """Return the allocation of given `lengths [n]` within the limits."""
    nothing, latency, rows = plain(batch), batch.latency, len(lengths)
    drafted = numpy.arange(1, batch.survival.shape[1] + 1) <= lengths[:, None]
    by_model = None if batch.by_model is None else batch.by_model.tolist()
    read = rows + batch.prefill_tokens
    target_s = latency.target.seconds(0, read + int(lengths.sum())) - latency.target.seconds(0, read)
    seconds = nothing.seconds + target_s + latency.draft_s(batch.contexts.tolist(), lengths.tolist(), by_model)
    return Allocation(lengths, rows + float((batch.survival * drafted).sum()), max(seconds, LEAST_S))


def order_at(batch: Batch, prices: Prices, price: float, floor: Ints | None = None) -> Ints:
    """Return the items `row · V + place` that may pay, the best at a price of a second in tokens first.

    Items of the lengths `floor [n]` come before all others. With a floor, none is left out for not paying.
    """
    value = batch.gains - price * (prices.item + prices.least)[:, None]
    worthy = value > 0
    if floor is not None:  # the price may be out of reach then
        worthy = batch.gains > 0
        must = numpy.arange(value.shape[1]) < floor[:, None]
        value[must], worthy[must] = numpy.inf, True
    value[~worthy] = -numpy.inf
    order = numpy.argsort(-value, axis=None, kind="stable")
    return order[: numpy.count_nonzero(worthy)]


def best_in(
    batch: Batch, prices: Prices, nothing: Allocation, order: Ints, forced: int = 0, budget_s: float = numpy.inf
) -> Allocation | None:
    """Return the lengths of the best ratio among the first items of `order`, the first of each case of draft passes.

    They draft something, have at least the `forced` first items and take at most `budget_s`. None if there are none.
    """
    rows, deepest = batch.survival.shape
    if not len(order):
        return None
    owner, place = numpy.divmod(order, deepest)
    within, seconds = _cases(batch, prices, owner, place)
    tokens = nothing.tokens + (batch.survival.ravel()[order] * within).cumsum(1)
    seconds = seconds + (prices.item[owner] * within).cumsum(1)
    seconds += prices.by_count[within.cumsum(1)] + nothing.seconds
    ratio = tokens / numpy.maximum(seconds, LEAST_S)
    if forced:
        ratio[:, : forced - 1] = 0.0
        ratio[~within[:, :forced].all(1)] = 0.0
    if budget_s < numpy.inf:
        ratio[seconds > budget_s] = 0.0
    case, last = divmod(int(ratio.argmax()), len(order))
    if ratio[case, last] <= 0:
        return None
    lengths = numpy.bincount(owner[: last + 1][within[case, : last + 1]], minlength=rows)
    return Allocation(lengths, float(tokens[case, last]), max(float(seconds[case, last]), LEAST_S))


def prices_of(batch: Batch) -> Prices:
    """Return what items of a batch cost."""
    latency, (rows, deepest) = batch.latency, batch.survival.shape
    counts = rows + batch.prefill_tokens + numpy.arange(rows * deepest + 1, dtype=numpy.float64)
    by_count = latency.target.by_tokens(counts)
    by_count -= by_count[0]
    least = float((by_count[1:] - by_count[:-1]).min(initial=numpy.inf))
    draft = latency.draft
    if draft is None:
        return Prices(by_count, least, numpy.zeros(rows), 0.0, numpy.zeros(rows, dtype=numpy.bool_))
    model = numpy.ones(rows, dtype=numpy.bool_) if batch.by_model is None else batch.by_model
    fixed, per_token = draft.chord(1, float(numpy.count_nonzero(model)))
    item = model * (per_token + draft.per_row + draft.per_context * batch.contexts)
    return Prices(by_count, least, item, fixed, model)


def _cases(batch: Batch, prices: Prices, owner: Ints, place: Ints) -> tuple[Bools, Floats]:
    """Return which items each case of paid draft passes allows `[cases, items]`, and what it costs `[cases, 1]`.

    Item: token `place` of row `owner`, from 0 on.
    """
    free_s = batch.latency.draft_free_s
    if not prices.model.any():
        return numpy.ones((1, len(owner)), dtype=numpy.bool_), numpy.array([[free_s]])
    depth = numpy.arange(1, int(place.max()) + 2)[:, None]
    within, passes_s = place < depth, numpy.asarray(depth * prices.draft_pass, dtype=numpy.float64)
    if prices.model.all():
        return within, passes_s
    own = prices.model[owner]
    return (
        numpy.concatenate([within & own, within | ~own, ~own[None, :]]),
        numpy.concatenate([passes_s, passes_s + free_s, [[free_s]]]),
    )
