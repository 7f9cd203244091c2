"""Steps planned row by row, at a price of a second in tokens: for rows with sources that name their nodes.

A node, or a pass of a draft, pays where the tokens expected of it exceed its cost at the price. The best price is the
goodput that it leads to (Dinkelbach 1967). It changes slowly, while the nodes that sources name change with every step:
so a price is kept for some steps, and each of them is planned for in microseconds a row.

Costs are a row's share of a step in which all rows draft alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy

from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.allocation import Allocation
from distillspec.serving.control.candidates import Candidates, chains
from distillspec.serving.control.grown_trees import Drafted, SharedPasses, grow, within
from distillspec.serving.control.offers import Chosen, Offer, PricedPlan
from distillspec.serving.control.reading import steps_to_pay
from distillspec.serving.costs.latency import LatencyModel

FEWEST = 4  # nodes of a row over which the cost of one is taken
ROUNDS, CLOSE = 3, 0.02  # in which a price is looked for, and how near it is to be to the goodput that it leads to
EXPLORED = 0.5  # plain steps that reading a text may take, so that its draft is explored
NOTHING = float("-inf")  # value of what cannot be drafted

Key = tuple[str, str, int, bool]  # of a tree: sequence, source, match, and whether it is behind likely nodes


class PriceList:
    """Costs and acceptance as they were known at one step, and the price that they lead to.

    Args:
        rows: of the step. Other steps of the same rows may be planned for too.
        most: the most levels of a row.
        trees: the nodes that a draft's trees may have, None for chains.
        price: tokens a second to start from. 0: those of plain decoding.
    """

    def __init__(
        self,
        rows: Sequence[RowView],
        most: int,
        acceptance: AcceptanceEstimate,
        latency: LatencyModel,
        *,
        trees: Candidates | None = None,
        price: float = 0.0,
    ) -> None:
        self.count, self.acceptance, self.latency = max(1, len(rows)), acceptance, latency
        self.context = sum([row.context_tokens for row in rows])
        self.most, self.nodes = most, chains(most) if trees is None else trees
        table, few = latency.target, self.count * FEWEST
        self.node_s = (table.seconds(0, self.count + few) - table.seconds(0, self.count)) / few
        self._free_s = latency.draft_free_s / self.count
        self._rows = tuple(rows)
        self._drafted: dict[Key, Drafted] = {}
        plain = self.plain(rows).goodput
        self.price = max(price, plain)
        for _ in range(ROUNDS):
            goodput = max(self.plan(rows).allocation.goodput, plain)
            if abs(goodput - self.price) <= CLOSE * self.price:
                break
            self.price = goodput
            self._drafted.clear()

    def plain(self, rows: Sequence[RowView]) -> Allocation:
        """Return the allocation without drafted tokens."""
        context = sum([row.context_tokens for row in rows])
        seconds = self.latency.target.seconds(context, len(rows), len(rows))
        return Allocation(numpy.zeros(len(rows), dtype=numpy.int64), len(rows), max(seconds, 1e-9))

    def plan(self, rows: Sequence[RowView], *, second: bool = False) -> PricedPlan:
        """Return the best plan at the price. `second`: of each row's sources, the second best one."""
        self._rows = tuple(rows)
        explored = self._explored(rows) if second else set[str]()
        offers = list(map(self._offers, rows))
        pairs = list(zip(rows, offers, strict=True))
        best = self._planned(rows, [_chosen(row, own, second=row.sequence_id in explored) for row, own in pairs])
        drafting = [each.row.source for each in best.chosen if each.drafts]
        if second or not drafting or (len(drafting) == len(rows) and len(set(drafting)) == 1):
            return best
        # A row's share of a draft's passes was that of a step in which all rows draft with it.
        other = self._planned(rows, [_chosen(row, own, drafts=False) for row, own in pairs])
        return max(best, other, key=lambda plan: plan.allocation.tokens - self.price * plan.allocation.seconds)

    def _planned(self, rows: Sequence[RowView], wished: Sequence[Chosen]) -> PricedPlan:
        """Return the plan with the nodes of these choices that pay together."""
        chosen = self._trimmed(wished)
        context = sum([row.context_tokens for row in rows])
        nodes = [each.shape.nodes + each.joined for each in chosen]
        drafting_s = self._drafting_s(chosen)
        seconds = self.latency.target.seconds(context, len(rows) + sum(nodes), len(rows)) + drafting_s
        tokens = len(rows) + sum([each.tokens for each in chosen])
        return PricedPlan(chosen, Allocation(numpy.array(nodes), tokens, max(seconds, 1e-9), None, drafting_s))

    def _explored(self, rows: Sequence[RowView]) -> set[str]:
        """Return the rows whose second best source may be tried: no long text is read for it, at most one short one."""
        reading_s = {row.sequence_id: sum(map(self._reading_s, row.options)) for row in rows}
        explored = {name for name, seconds in reading_s.items() if not seconds}
        behind = min([(seconds, name) for name, seconds in reading_s.items() if seconds], default=None)
        if behind is not None and behind[0] <= EXPLORED * self.plain(rows).seconds:
            explored.add(behind[1])
        return explored

    def _offers(self, row: RowView) -> list[Offer]:
        """Return what may be drafted for a row, best first: one source's tokens, or a draft's behind named nodes."""
        able = [option for option in row.options if option.limit]
        alone = [self._named(option) if _names(option) else self._tree(row, option) for option in able]
        offers = [offer for offer in alone if offer.value > NOTHING]
        for first in [offer for offer in offers if offer.option.likely is not None]:
            joined = [option._replace(likely=first.option.likely) for option in able if option.drafted_by_model]
            behind = [self._tree(row, option) for option in joined]
            offers += [first.and_then(offer) for offer in behind if offer.value > NOTHING]
        return sorted(offers, key=lambda offer: -offer.value)

    def _named(self, option: Option) -> Offer:
        """Return the nodes that a source names and that pay, each by itself."""
        least, tokens, count = self.price * self.node_s, 0.0, 0
        for chance in () if option.likely is None else option.likely.chances:
            if chance <= least:
                break
            tokens, count = tokens + chance, count + 1
        if option.likely is None or not count:
            return Offer(NOTHING, option)
        kept = option.likely.first(count)
        value = tokens - least * count - self.price * self._free_s
        return Offer(value, option._replace(likely=kept), kept.shape, tokens)

    def _tree(self, row: RowView, option: Option) -> Offer:
        """Return a source's tree for a row, the first one found for it. Those of all its rows are grown together."""
        key = _key(row, option)
        own = self._drafted.get(key)
        if own is None:
            self._grow(option)
            own = self._drafted.get(key)
        if own is None or own.shape.depth > option.limit or own.shape.nodes > self._room(option):
            own = self._drafted[key] = self._grown([row], [option])[0]
        if not own.shape.depth:
            return Offer(NOTHING, option)
        tokens = own.tokens if option.likely is None else own.tokens * option.likely.missed
        seconds = own.seconds + self._reading_s(option) / steps_to_pay(row.left, 1 + own.tokens)
        return Offer(tokens - self.price * seconds, option, own.shape, tokens)

    def _grow(self, like: Option) -> None:
        """Grow the trees of a source, alone or behind likely nodes, for all rows of the step."""
        joined = like.drafted_by_model and like.likely is not None
        found = [(row, own) for row in self._rows for own in row.options if _is_like(own, like)]
        pairs = [(row, own._replace(likely=self._likely(row)) if joined else own) for row, own in found]
        pairs = [(row, own) for row, own in pairs if own.likely is not None or not joined]
        if not pairs:
            return
        rows, options = zip(*pairs, strict=True)
        for row, option, tree in zip(rows, options, self._grown(rows, options), strict=True):
            self._drafted[_key(row, option)] = tree

    def _likely(self, row: RowView) -> LikelyNodes | None:
        """Return the named nodes that a draft's tree would be behind."""
        named = [self._named(option) for option in row.options if option.limit and _names(option)]
        return next((offer.option.likely for offer in named if offer.value > NOTHING), None)

    def _grown(self, rows: Sequence[RowView], options: Sequence[Option]) -> tuple[Drafted, ...]:
        """Return the best trees of one source for some rows, as if it drafted alike for all that it can draft for."""
        first, nodes = options[0], self.nodes if any(option.wide for option in options) else chains(self.nodes.depth)
        chances = self.acceptance.of_rows(list(map(RowView.with_option, rows, options)))
        gains = nodes.survival(numpy.minimum.accumulate(chances, 2))  # siblings are tried in turn
        limits = numpy.array([option.limit for option in options])
        gains *= nodes.depths <= limits[:, None]
        if not all(option.wide for option in options):
            gains *= nodes.spine | numpy.array([option.wide for option in options])[:, None]
        before = [0 if option.likely is None else len(option.likely.chances) for option in options]
        able = [row for row in self._rows if any(_is_like(own, first) for own in row.options)]
        every = max(len(able), len(rows))
        context = self.context / self.count * every
        latency = self.latency.of_draft(first.at_once, first.source)
        if not first.drafted_by_model:
            latency = replace(latency, draft=None, draft_free_s=self._free_s * every)
        share = len(rows) / every
        tokens = self.count + sum(before) / share
        passes = SharedPasses.of(latency, nodes.depth, gains.size, every, tokens, context, share)
        missed = numpy.array([1.0 if option.likely is None else option.likely.missed for option in options])
        return grow(nodes, within(gains, list(map(self._room, options))), missed, passes, self.price)

    def _reading_s(self, option: Option) -> float:
        """Return the seconds in which a draft reads a text that it is far behind in."""
        return self.latency.reading_s(option.unread_tokens, option.source) if option.drafted_by_model else 0.0

    def _room(self, option: Option) -> int:
        """Return the most nodes of a draft's tree: the engine reserves places for a tree's, likely nodes included."""
        return max(self.most, len(self.nodes) - (0 if option.likely is None else len(option.likely.chances)))

    def _trimmed(self, chosen: Sequence[Chosen]) -> tuple[Chosen, ...]:
        """Return the rows with as many likely nodes as pay by the target's table, in which further ones may jump."""
        likely = [each.row.likely.chances if each.row.likely is not None else () for each in chosen]
        chances = sorted([chance for own in likely for chance in own], reverse=True)
        if not chances:
            return tuple(chosen)
        base = len(chosen) + sum([each.shape.nodes for each in chosen if each.row.likely is None or each.joined])
        best, gained, kept, table = 0.0, 0.0, 0, self.latency.target
        before_s = table.seconds(0, base)
        for number, chance in enumerate(chances, 1):
            gained += chance
            value = gained - self.price * (table.seconds(0, base + number) - before_s)
            if value > best:
                best, kept = value, number
        if kept == len(chances):
            return tuple(chosen)
        least = chances[kept - 1] if kept else 2.0
        counts = [sum([chance >= least for chance in own]) for own in likely]
        return tuple(map(Chosen.first, chosen, counts))

    def _drafting_s(self, chosen: Sequence[Chosen]) -> float:
        """Return the seconds of all drafting."""
        drafting: dict[tuple[bool, str], list[Chosen]] = {}
        for each in chosen:
            if each.drafts:
                drafting.setdefault((each.row.at_once, each.row.source), []).append(each)
        seconds = self.latency.draft_free_s * any(each.row.likely is not None for each in chosen)
        for (at_once, source), own in drafting.items():
            work = [(each.row.context_tokens, each.shape.reads) for each in own]
            seconds += self.latency.of_draft(at_once, source).trees_s(work)
        return seconds


def _chosen(row: RowView, offers: Sequence[Offer], *, second: bool = False, drafts: bool = True) -> Chosen:
    """Return the best offer to a row, or the second best one, if any is worth its cost.

    Args:
        drafts: False: no draft runs.
    """
    found = [offer for offer in offers if drafts or not offer.option.drafted_by_model]
    without = max([0.0, *[offer.value for offer in found if offer.option.likely is None]])
    place = int(second and len(found) > 1)
    if not found or (found[place].value <= 0 and not second):
        return Chosen(row._replace(others=(), likely=None))
    best = found[place]
    return Chosen(row.with_option(best.option), best.shape, best.tokens, max(0.0, best.value - without))


def _key(row: RowView, option: Option) -> Key:
    return row.sequence_id, option.source, option.match, option.likely is not None


def _is_like(option: Option, other: Option) -> bool:
    return option.limit > 0 and option.source == other.source and option.drafted_by_model == other.drafted_by_model


def _names(option: Option) -> bool:
    """Return True for a source that names its nodes."""
    return option.likely is not None and not option.drafted_by_model
