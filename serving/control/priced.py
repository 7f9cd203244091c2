"""Steps planned row by row, at a price of a second in tokens: for rows with sources that name their nodes.

A node, or a pass of a draft, pays where the tokens expected of it exceed its cost at the price. The best price is the
goodput that it leads to (Dinkelbach 1967). It changes slowly, while the nodes that sources name change with every step:
so a price is kept for some steps, and each of them is planned for in microseconds a row.

Costs are a row's share of a step in which all rows draft alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy

from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.allocation import Allocation
from distillspec.serving.control.candidates import Candidates, chains
from distillspec.serving.control.offers import Chosen, Drafted, Offer, PricedPlan
from distillspec.serving.control.reading import steps_to_pay
from distillspec.serving.costs.latency import LatencyModel

FEWEST = 4  # nodes over which the cost of one is taken
STOP = 0.5  # share of its cost below which a node, and those after it, are not looked at
EXPLORED = 0.5  # plain steps that reading a text may take, so that its draft is explored
NOTHING = float("-inf")  # value of what cannot be drafted


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
        self.node_s = self._nodes_s(0, FEWEST) / FEWEST
        self._free_s = latency.draft_free_s / self.count
        self._drafted: dict[tuple[str, str, int, bool], Drafted] = {}
        plain = self.plain(rows).goodput
        self.price = max(price, plain)
        found = self.plan(rows).allocation
        if abs(found.goodput - self.price) > 0.02 * self.price:
            self.price = max(found.goodput, plain)
            self._drafted.clear()

    def plain(self, rows: Sequence[RowView]) -> Allocation:
        """Return the allocation without drafted tokens."""
        context = sum([row.context_tokens for row in rows])
        seconds = self.latency.target.seconds(context, len(rows), len(rows))
        return Allocation(numpy.zeros(len(rows), dtype=numpy.int64), len(rows), max(seconds, 1e-9))

    def plan(self, rows: Sequence[RowView], *, second: bool = False) -> PricedPlan:
        """Return the best plan at the price. `second`: of each row's sources, the second best one."""
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
        drafting_s = self._drafting_s(chosen, context)
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
        """Return a source's tree of the highest value, the first one found for the row."""
        key = (row.sequence_id, option.source, option.match, option.likely is not None)
        own, before = self._drafted.get(key), 0 if option.likely is None else len(option.likely.chances)
        if own is None or own.shape.depth > option.limit or own.shape.nodes > self._room(before):
            own = self._drafted[key] = self._grown(row, option, before)
        if not own.shape.depth:
            return Offer(NOTHING, option)
        tokens = own.tokens if option.likely is None else own.tokens * option.likely.missed
        seconds = own.seconds + self._reading_s(option) / steps_to_pay(row.left, 1 + own.tokens)
        return Offer(tokens - self.price * seconds, option, own.shape, tokens)

    def _reading_s(self, option: Option) -> float:
        """Return the seconds in which a draft reads a text that it is far behind in."""
        return self.latency.reading_s(option.unread_tokens, option.source) if option.drafted_by_model else 0.0

    def _room(self, before: int) -> int:
        """Return the most nodes of a draft's tree behind so many others: the engine reserves places for a tree's."""
        return max(self.most, len(self.nodes) - before)

    def _grown(self, row: RowView, option: Option, before: int) -> Drafted:
        """Return the tree with the best number of levels and, of its nodes, the likeliest that pay together."""
        room = self._room(before)
        missed = 1.0 if option.likely is None else option.likely.missed
        nodes = self.nodes if option.wide else chains(self.nodes.depth)
        gains = nodes.survival(self.acceptance.of_rows([row.with_option(option)]))[0]
        order = nodes.best_first(gains)
        best, value, kept = Drafted(), 0.0, list[int]()
        for levels in range(1, min(option.limit, nodes.depth) + 1):
            pass_s, tokens, taken = self._pass_s(option, levels), 0.0, list[int]()
            for node, gain in order:
                if missed * gain <= STOP * self.price * self.node_s or len(taken) == room:
                    break
                if nodes.depths[node] > levels:
                    continue
                taken.append(node)
                tokens += gain
                seconds = pass_s + self._nodes_s(before, len(taken))
                if missed * tokens - self.price * seconds > value:
                    best, value, kept = Drafted(tokens, seconds), missed * tokens - self.price * seconds, list(taken)
        if not kept:
            return best
        return best._replace(shape=nodes.shape(numpy.bincount(kept, minlength=len(nodes)) > 0))

    def _nodes_s(self, before: int, count: int) -> float:
        """Return a row's share of the seconds that so many nodes of each row add, behind `before` others of each."""
        first, table = self.count * (1 + before), self.latency.target
        return (table.seconds(0, first + self.count * count) - table.seconds(0, first)) / self.count

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

    def _pass_s(self, option: Option, levels: int) -> float:
        """Return a row's share of the passes that draft so many levels."""
        own = self.latency.of_draft(option.at_once, option.source)
        if not option.drafted_by_model or own.draft is None:
            return self._free_s
        return own.loop_s(self.count, self.context, levels) / self.count

    def _drafting_s(self, chosen: Sequence[Chosen], context: int) -> float:
        """Return the seconds of all drafting."""
        levels: dict[tuple[bool, str], list[int]] = {}
        free = False
        for each in chosen:
            if each.drafts:
                levels.setdefault((each.row.at_once, each.row.source), []).append(each.shape.depth)
            free |= each.row.likely is not None
        seconds = self.latency.draft_free_s * free
        for (at_once, source), depths in levels.items():
            own = self.latency.of_draft(at_once, source)
            mean = context / len(chosen) * len(depths)
            seconds += own.loop_s(len(depths), mean, max(depths)) if own.draft is not None else 0.0
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


def _names(option: Option) -> bool:
    """Return True for a source that names its nodes."""
    return option.likely is not None and not option.drafted_by_model
