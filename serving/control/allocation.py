"""Optimal trees: the most tokens a second for given survival probabilities and costs.

Each node that may be drafted is an item with a gain, the probability that it is emitted. A set of items costs the
target's pass over them, a draft pass for each depth over the nodes that have children there, and the context that those
read. For a given price of a second and a deepest item the best sets are those with the highest gain less their cost at
that price, and each number of them is tried. The ratio found is the next price (Dinkelbach 1967). Sets are priced by
the tables as they are. A set holds the parent and the elder siblings of each of its items.

For chains the optimum is exact where a draft pass costs a line by its rows, and a row of little loss else: items are
put in order by that line. A draft of blocks costs one pass, by the rows that draft and the deepest of them: items are
put in order by their gain.

Prompt tokens read in the same step cost the same whatever is drafted, so their time is in no allocation. They are only
counted as tokens of the target's pass, where they may make each further token dearer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy

from distillspec.serving.control.candidates import Candidates, chains
from distillspec.serving.costs.drafted import Bools, DraftedCosts, Ints
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import Floats

LEAST_S = 1e-9


class Allocation(NamedTuple):
    """Lengths by row, and what they are expected to give: tokens (bonus included) and seconds.

    taken: `[n, U]` bool, the nodes of each row's tree, None for chains.
    drafting_s: the seconds without the target's pass.
    """

    lengths: Ints
    tokens: float
    seconds: float
    taken: Bools | None = None
    drafting_s: float = 0.0

    @property
    def nodes(self) -> int:
        """Drafted tokens."""
        return int((self.lengths if self.taken is None else self.taken).sum())

    @property
    def goodput(self) -> float:
        """Expected tokens a second."""
        return self.tokens / self.seconds


class Besides(NamedTuple):
    """Rows of the same step that lengths are not chosen for, with the work and tokens that are planned for them."""

    rows: int = 0
    context: int = 0  # of all of them
    nodes: int = 0  # drafted tokens
    tokens: float = 0.0  # expected
    seconds: float = 0.0  # of drafting


NOTHING = Besides()


@dataclass(eq=False)
class Batch:
    """Rows, survival and costs that lengths are chosen for.

    survival: `[n, V]`, P(the first 1 … V drafted tokens of row i all stand); never rising along a row.
    limits: `[n]`, the most levels of each row. Survival beyond is set to 0.
    contexts, latency, prefill_tokens, by_model: as in `DraftedCosts`.
    price: tokens a second that the search starts from, such as the last step's best. 0: those of plain decoding.
    nodes: of trees, a chain of V levels among them. None: chains alone.
    gains: `[n, U]`, P(each of these nodes is on the accepted path).
    besides: other rows of the step, which other drafts draft for. Tokens and seconds of allocations count them in.
    """

    survival: Floats
    limits: Ints
    contexts: Ints
    latency: LatencyModel
    prefill_tokens: int = 0
    by_model: Bools | None = None
    price: float = 0.0
    nodes: Candidates | None = None
    gains: Floats | None = None
    besides: Besides = NOTHING

    def __post_init__(self) -> None:
        rows, most = self.survival.shape
        if self.limits.min(initial=most) < most:
            self.survival = self.survival * (numpy.arange(most) < self.limits[:, None])
            if self.nodes is not None and self.gains is not None:
                self.gains = self.gains * (self.nodes.depths <= self.limits[:, None])
        other = self.besides
        every, context = rows + other.rows, float(self.contexts.sum()) + other.context
        target = self.latency.target
        seconds = target.seconds(context, every, every) + other.seconds
        seconds += target.seconds(0, self.read) - target.seconds(0, self.read - other.nodes)
        self.plain = Allocation(numpy.zeros(rows, dtype=numpy.int64), rows + other.tokens, max(seconds, LEAST_S))

    @property
    def read(self) -> int:
        """Tokens of the target's pass besides those that are drafted here."""
        return len(self.limits) + self.prefill_tokens + self.besides.rows + self.besides.nodes

    @cached_property
    def costs(self) -> DraftedCosts:
        """Costs of drafted tokens."""
        most = self.survival.shape[1]
        further = self.read - len(self.limits)
        return DraftedCosts(self.latency, self.contexts, most, further, self.by_model, len(self.items[0]))

    @cached_property
    def items(self) -> tuple[Candidates, Floats]:
        """Nodes that may be taken, and the tokens that each is expected to add `[n, U]`."""
        if self.nodes is None or self.gains is None:
            return chains(self.survival.shape[1]), self.survival
        return self.nodes, self.gains


def best_by_row(batch: Batch) -> Allocation:
    """The lengths of highest goodput, each row its own."""
    best = batch.plain
    if not batch.limits.any() or not batch.survival.size:
        return best
    if len(batch.limits) == 1 and batch.nodes is None:
        return _best_of_one(batch)
    price, before = batch.price or best.goodput, numpy.array([-1])  # no order
    while not numpy.array_equal(order := order_at(batch, price), before):
        found = best_in(batch, order)
        if found is not None and found.goodput > best.goodput:
            best = found
        elif price == best.goodput:
            break
        price, before = best.goodput, order
    return best


def _best_of_one(batch: Batch) -> Allocation:
    """A chain of a single row: all lengths in turn, in plain numbers, since arrays of a few are slower."""
    latency, best, read = batch.latency, batch.plain, batch.read
    if batch.by_model is not None and not batch.by_model[0]:
        latency = replace(latency, draft=None)
    context, once_s = int(batch.contexts[0]), best.seconds - latency.target.seconds(0, read)
    tokens = best.tokens
    for length, survives in enumerate(batch.survival[0, : int(batch.limits[0])].tolist(), 1):
        tokens += survives
        drafting_s = latency.loop_s(1, context, length)
        seconds = once_s + latency.target.seconds(0, read + length) + drafting_s
        if tokens / seconds > best.goodput:
            best = Allocation(numpy.array([length]), tokens, seconds, None, drafting_s)
    return best


def best_for_all(batch: Batch) -> Allocation:
    """The best single length for all rows (each cut to its limit), by trying all."""
    return max(every_length(batch), key=lambda allocation: allocation.goodput)


def every_length(batch: Batch) -> list[Allocation]:
    """Return the allocations of each single length for all rows, from 0 on."""
    longest = min(batch.survival.shape[1], int(batch.limits.max(initial=0)))
    return [batch.plain, *expected(batch, numpy.minimum(batch.limits, numpy.arange(1, longest + 1)[:, None]))]


def expected(batch: Batch, lengths: Ints) -> list[Allocation]:
    """Return the allocations of given `lengths [m, n]` within the limits."""
    tokens = row_tokens(batch)[numpy.arange(lengths.shape[1]), lengths].sum(1) + batch.besides.tokens
    added_s = batch.costs.of(lengths)
    drafting_s = added_s - batch.costs.target_s[lengths.sum(1)]
    columns = (tokens.tolist(), (batch.plain.seconds + added_s).tolist(), [None] * len(tokens), drafting_s.tolist())
    return [Allocation(*one) for one in zip(lengths, *columns, strict=True)]


def row_tokens(batch: Batch) -> Floats:
    """Return the expected tokens of each row by length `[n, V + 1]`. Beyond a row's limit, those of the limit."""
    tokens = numpy.ones((len(batch.limits), batch.survival.shape[1] + 1))
    tokens[:, 1:] += batch.survival.cumsum(1)
    return tokens


def order_at(batch: Batch, price: float, floor: Ints | None = None) -> Ints:
    """Return the items `row · U + node` that may pay, the best at a price of a second in tokens first.

    Chains of the lengths `floor [n]` come before all others. With a floor, none is left out for not paying.
    """
    (nodes, gains), costs, most = batch.items, batch.costs, 0.0
    loss = price * numpy.where(nodes.firsts, costs.least_s[:, None], costs.verified_s) - gains
    if floor is not None:  # the price may be out of reach then
        most = numpy.inf
        loss[gains <= 0] = most
    if batch.nodes is not None:
        loss = _in_turn(loss, nodes)
    if floor is not None:
        loss[nodes.spine & (nodes.depths <= floor[:, None])] = -numpy.inf
    return loss.argsort(axis=None, kind="stable")[: numpy.count_nonzero(loss < most)]


def _in_turn(loss: Floats, nodes: Candidates) -> Floats:
    """Return losses `[n, U]` whose order puts no item before its parent or an elder sibling.

    The first of a family share their mean loss where that is lower: a draft pass may pay for them together.
    """
    padded = numpy.concatenate([loss, numpy.full((len(loss), 1), numpy.inf)], 1)
    family = padded[:, nodes.families]  # [n, F, W]
    ranks = numpy.arange(family.shape[2])
    mean = family.cumsum(2) / (ranks + 1)
    last = mean.argmin(2)[..., None]
    family = numpy.where(ranks <= last, mean.min(2)[..., None], family)
    padded[:, nodes.families] = numpy.maximum.accumulate(family, 2)
    for level in nodes.levels[1:]:
        padded[:, level] = numpy.maximum(padded[:, level], padded[:, nodes.parents[level]])
    return padded[:, :-1]


def best_in(batch: Batch, order: Ints, forced: int = 0, budget_s: float = numpy.inf) -> Allocation | None:
    """Return the lengths of the best ratio among the first items of `order`, whatever the deepest of a draft pass.

    They have at least the `forced` first items and take at most `budget_s`. None if there are none.
    """
    if not len(order):
        return None
    (nodes, gains), costs = batch.items, batch.costs
    owner, node = numpy.divmod(order, len(nodes))
    level, lead = nodes.depths[node], 1  # the draft pass of an item, 0 for none
    if not costs.model.all():
        level, lead = level * costs.model[owner], 0
    at = level == numpy.arange(lead, int(level.max()) + 1)[:, None]  # [levels, items]

    def sums(of_levels: Floats | Ints) -> Floats | Ints:
        """Sums over the levels up to each, and then over those without level 0."""
        up_to = of_levels.cumsum(0)
        return up_to if lead else numpy.concatenate([up_to, up_to[1:] - up_to[0]])

    added = at.cumsum(1)
    read = added if batch.nodes is None else (at & nodes.firsts[node]).cumsum(1)
    read_s = (at * (costs.read_s[owner] * nodes.spine[node])).cumsum(1)
    level_s = costs.by_depth(read[1 - lead :], read_s[1 - lead :])
    if lead == 0:
        level_s = numpy.concatenate([batch.latency.draft_free_s * (read[:1] > 0), level_s])
    taken = sums(added)
    tokens = sums((at * gains.take(order)).cumsum(1)) + batch.plain.tokens
    seconds = sums(level_s) + costs.target_s[taken] + batch.plain.seconds
    ratio = tokens / seconds
    if forced:
        ratio[:, : forced - 1] = 0.0
        ratio[taken[:, forced - 1] < forced] = 0.0
    if budget_s < numpy.inf:
        ratio[seconds > budget_s] = 0.0
    case, last = divmod(int(ratio.argmax()), len(order))
    if ratio[case, last] <= 0:
        return None
    levels = at[: case + 1] if case < len(at) else at[1 : case - len(at) + 2]
    kept = order[: last + 1][levels[:, : last + 1].any(0)]
    chosen = numpy.zeros(gains.shape, dtype=bool)
    chosen.put(kept, True)
    lengths = (chosen * nodes.depths).max(1, initial=0)
    trees, added_s = None if batch.nodes is None else chosen, float(seconds[case, last])
    drafting_s = added_s - batch.plain.seconds - float(costs.target_s[len(kept)])
    return Allocation(lengths, float(tokens[case, last]), added_s, trees, drafting_s)
