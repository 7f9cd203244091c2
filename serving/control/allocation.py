"""Optimal lengths: the most tokens a second for given survival probabilities and costs, exact for every batch.

A draft pass is paid once a depth, whatever the rows; every drafted token costs a place in its row's pass and one in
the target's. So for a given deepest pass D the fixed costs are known, and what is left is a set of (row, depth) items
with a gain (the probability that the token is emitted) and a cost. The best *ratio* takes items in order of gain by
cost while that exceeds the ratio so far; survival never rises with depth, so a row's items are taken from the first on.
The best D follows by trying all. (Adding the best marginal row while goodput rises is not optimal: the first row alone
may not pay for a pass that two rows pay for.) Rows whose drafts come without a model pay for no pass; with them there
are two cases for each D, with and without these rows.

Experts of a mixture cost by the *number* of tokens verified, less for each further one, and products padded to a few
sizes cost in steps, so no fixed order of items is right at once. For a given price λ of a second the best set is (items
by gain − λ · cost, each count tried), and raising λ to the ratio of the set found until nothing changes gives the best
ratio (Dinkelbach 1967): exact as well.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy
from numpy.typing import NDArray

from distillspec.serving.control.latency import LatencyModel

Floats = NDArray[numpy.float64]
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
    by_model: `[n]`, False where a row's drafts come without the draft model; None: as `latency` has a draft or not.
    """

    survival: Floats
    limits: Ints
    contexts: Ints
    latency: LatencyModel
    prefill_tokens: int = 0
    by_model: Bools | None = None


def best_by_row(batch: Batch) -> Allocation:
    """The lengths of highest goodput, each row its own."""
    nothing = plain(batch)
    if not batch.survival.size or not batch.limits.any():
        return nothing
    if len(batch.limits) == 1:
        return _best_of_one(batch, nothing)
    if batch.latency.target.is_uneven:
        return _best_of_uneven(batch, nothing)
    found = best_from(batch, nothing)
    return nothing if found is None or found.goodput <= nothing.goodput else found


def best_for_all(batch: Batch) -> Allocation:
    """The best single length for all rows (each cut to its limit), by trying all."""
    return max(every_length(batch), key=lambda allocation: allocation.goodput)


def every_length(batch: Batch) -> list[Allocation]:
    """Return the allocations of each single length for all rows, from 0 on."""
    nothing, latency, draft = plain(batch), batch.latency, batch.latency.draft
    longest = min(batch.survival.shape[1], int(batch.limits.max(initial=0)))
    if not longest:
        return [nothing]
    depth, model = numpy.arange(1, longest + 1), _by_model(batch)
    lengths = numpy.minimum(batch.limits, depth[:, None])  # [longest, n]
    drafted = lengths.sum(1)
    gain = numpy.where(depth <= batch.limits[:, None], batch.survival[:, :longest], 0.0)
    tokens = nothing.tokens + gain.sum(0).cumsum()
    seconds = nothing.seconds + lengths @ _costs(batch, model)
    if draft is not None and model.any():
        seconds += draft.fixed * lengths[:, model].max(1)
    if not model.all():
        seconds += latency.draft_free_s * lengths[:, ~model].any(1)
    if latency.target.is_uneven:
        uneven_s = _uneven_by_count(batch)
        seconds += uneven_s[drafted] - uneven_s[0]
    found = zip(lengths, tokens.tolist(), seconds.tolist(), strict=True)
    return [nothing, *(Allocation(*one) for one in found)]


def plain(batch: Batch) -> Allocation:
    """Return the allocation without speculation."""
    rows = len(batch.limits)
    seconds = batch.latency.target_s(batch.contexts.tolist(), [0] * rows, batch.prefill_tokens)
    return Allocation(numpy.zeros(rows, dtype=numpy.int64), float(rows), max(seconds, 1e-9))


def expected(batch: Batch, lengths: Ints) -> Allocation:
    """Return the allocation of given `lengths [n]` within the limits."""
    drafted = numpy.arange(1, batch.survival.shape[1] + 1) <= lengths[:, None]
    by_model = None if batch.by_model is None else batch.by_model.tolist()
    seconds = batch.latency.step_s(batch.contexts.tolist(), lengths.tolist(), batch.prefill_tokens, by_model)
    return Allocation(lengths, len(lengths) + float((batch.survival * drafted).sum()), max(seconds, 1e-9))


def best_from(
    batch: Batch, nothing: Allocation, floor: Ints | None = None, budget_s: float = numpy.inf
) -> Allocation | None:
    """Return the best lengths that draft something, are at least `floor [n]` and take at most `budget_s`.

    None if there are none. Uneven costs are counted, but do not change the order of items.
    """
    rows, deepest = batch.survival.shape
    latency, model = batch.latency, _by_model(batch)
    depth = numpy.arange(1, deepest + 1)
    gain = _gains(batch, depth)
    cost = _costs(batch, model)
    density = gain / numpy.maximum(cost, 1e-12)[:, None]
    forced = 0
    if floor is not None:
        must = depth <= floor[:, None]
        forced = int(must.sum())
        density = numpy.where(must, numpy.inf, density)
    order = numpy.argsort(-density, axis=None, kind="stable")
    if floor is None and not latency.target.is_uneven:
        # What gives less for a second than no speculation does is in no best set: without it, the rest is better.
        order = order[: numpy.count_nonzero(density > nothing.goodput)]
        if not len(order):
            return None
    owner, place = numpy.divmod(order, deepest)
    gain, cost = gain.ravel()[order], cost[owner]
    within, fixed_s = _cases(batch, model, owner, place, depth)
    tokens = nothing.tokens + (gain * within).cumsum(1)
    seconds = nothing.seconds + fixed_s[:, None] + (cost * within).cumsum(1)
    if latency.target.is_uneven:
        uneven_s = _uneven_by_count(batch)
        seconds += uneven_s[numpy.cumsum(within & (gain > 0), 1)] - uneven_s[0]
    ratio = tokens / seconds
    if floor is not None:
        ratio[:, : max(0, forced - 1)] = 0.0
        ratio[~within[:, :forced].all(1)] = 0.0
        ratio[seconds > budget_s] = 0.0
    case, last = divmod(int(ratio.argmax()), len(gain))
    if ratio[case, last] <= 0:
        return None
    taken = owner[: last + 1][within[case, : last + 1] & (gain[: last + 1] > 0)]
    lengths = numpy.bincount(taken, minlength=rows)
    if floor is not None:
        return expected(batch, numpy.maximum(lengths, floor))
    return Allocation(lengths, float(tokens[case, last]), float(seconds[case, last]))


def _best_of_one(batch: Batch, nothing: Allocation) -> Allocation:
    """A single row: all lengths in turn, in plain numbers, since arrays of a few are slower."""
    latency, draft = batch.latency, batch.latency.draft
    limit = min(int(batch.limits[0]), batch.survival.shape[1])
    a_token, once_s = latency.target.per_token, latency.draft_free_s
    if draft is not None and (batch.by_model is None or bool(batch.by_model[0])):
        a_token += draft.per_token + draft.per_context * int(batch.contexts[0]) + draft.fixed
        once_s = 0.0
    uneven_s = _uneven_by_count(batch).tolist() if latency.target.is_uneven else [0.0] * (limit + 1)
    best, length, tokens = nothing, 0, 1.0
    for survives in batch.survival[0, :limit].tolist():
        tokens, length = tokens + survives, length + 1
        seconds = nothing.seconds + once_s + a_token * length + uneven_s[length] - uneven_s[0]
        if tokens / seconds > best.goodput:
            best = Allocation(numpy.array([length]), tokens, seconds)
    return best


def _best_of_uneven(batch: Batch, nothing: Allocation) -> Allocation:
    """Run Dinkelbach's iteration from plain decoding up. Each round is the best set at the price so far."""
    rows, deepest = batch.survival.shape
    model, depth = _by_model(batch), numpy.arange(1, deepest + 1)
    allowed = depth <= batch.limits[:, None]
    cost = _costs(batch, model)[:, None]
    uneven_s = _uneven_by_count(batch)
    best = nothing
    while True:
        value = numpy.where(allowed, batch.survival - best.goodput * cost, -numpy.inf).ravel()
        order = numpy.argsort(-value, kind="stable")
        owner, place = numpy.divmod(order, deepest)
        within, fixed_s = _cases(batch, model, owner, place, depth)
        within = within & (value[order] > -numpy.inf)
        worth = numpy.cumsum(numpy.where(within, value[order], 0.0), 1)
        worth -= best.goodput * (uneven_s[numpy.cumsum(within, 1)] + fixed_s[:, None])
        case, last = divmod(int(numpy.argmax(worth)), len(order))
        taken = owner[: last + 1][within[case, : last + 1]]
        found = expected(batch, numpy.bincount(taken, minlength=rows))
        if found.goodput <= best.goodput * (1 + 1e-12):
            return best
        best = found


def _gains(batch: Batch, depth: Ints) -> Floats:
    """Return the expected tokens of each item `[n, V]`, 0 beyond a row's limit."""
    if (batch.limits >= len(depth)).all():
        return batch.survival
    return numpy.where(depth <= batch.limits[:, None], batch.survival, 0.0)


def _by_model(batch: Batch) -> Bools:
    """`[n]`: which rows take part in the draft's passes."""
    if batch.latency.draft is None:
        return numpy.zeros(len(batch.limits), dtype=numpy.bool_)
    return numpy.ones(len(batch.limits), dtype=numpy.bool_) if batch.by_model is None else batch.by_model


def _costs(batch: Batch, model: Bools) -> Floats:
    """Seconds that one more drafted token of each row costs, beside the fixed cost of its pass, `[n]`."""
    costs = numpy.full(len(model), batch.latency.target.per_token)
    draft = batch.latency.draft
    return costs if draft is None else costs + model * (draft.per_token + draft.per_context * batch.contexts)


def _cases(batch: Batch, model: Bools, owner: Ints, place: Ints, depth: Ints) -> tuple[Bools, Floats]:
    """Return which items each case of paid fixed costs allows `[cases, items]`, and these costs `[cases]`.

    Item: token `place` of row `owner`, from 0 on.
    """
    latency = batch.latency
    if latency.draft is None:
        return numpy.ones((1, len(owner)), dtype=numpy.bool_), numpy.array([latency.draft_free_s])
    within = place < depth[:, None]
    fixed_s = depth.astype(numpy.float64) * latency.draft.fixed
    if model.all():
        return within, fixed_s
    own = model[owner]
    without, all_free = within & own, within | ~own
    only_free = ~own[None, :]
    return (
        numpy.concatenate([without, all_free, only_free]),
        numpy.concatenate([fixed_s, fixed_s + latency.draft_free_s, [latency.draft_free_s]]),
    )


def _uneven_by_count(batch: Batch) -> Floats:
    """Return the uneven part of the target's pass, in seconds by the number of drafted tokens from 0 on."""
    latency, (rows, deepest) = batch.latency, batch.survival.shape
    beside = batch.prefill_tokens if latency.prefill is None else 0
    tokens = rows + beside + numpy.arange(rows * deepest + 1, dtype=numpy.float64)
    return latency.target.uneven_s(tokens)
