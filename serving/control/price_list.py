"""Steps planned at a price of a second in tokens, row by row.

A node, or a pass of a draft, pays where the tokens expected of it exceed its cost at the price. The best price is the
goodput that it leads to (Dinkelbach 1967). It changes slowly, while the nodes that sources name change with every step:
so a price may be kept for some steps, and each of them is planned for in microseconds a row.

Each source's trees are grown for all rows of a step together. To choose among sources, a row is charged its share.
Prompt tokens read in the same step cost the same whatever is drafted, so their time is in no plan. They are only
counted as tokens of the target's pass, where they may make each further token dearer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import numpy

from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.base.shape import chain_shape
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.candidates import Candidates, chains
from distillspec.serving.control.grown_trees import Drafted, grow, within
from distillspec.serving.control.offers import Chosen, Offer, StepPlan, choose
from distillspec.serving.costs.chain_batch import LEAST_S, Expected
from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.serving.costs.latency import LatencyModel

FEWEST = 4  # nodes of a row over which the cost of one is taken
ROUNDS, CLOSE = 3, 0.02  # in which a price is looked for, and how near it is to be to the goodput that it leads to
PAYS_BACK = 24  # steps in which the reading of a long text by a draft must pay
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
        hope: see `AcceptanceEstimate.chances`.
        prefill_tokens: prompt tokens in the target's pass.
        before: nodes of each draft for these rows in the step before, None if it had others.
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
        hope: float = 0.0,
        prefill_tokens: int = 0,
        before: Mapping[str, int] | None = None,
    ) -> None:
        self.count, self.acceptance, self.latency, self.hope = max(1, len(rows)), acceptance, latency, hope
        self.most, self.nodes = most, chains(most) if trees is None else trees
        self.read = len(rows) + prefill_tokens  # tokens of the target's pass, whatever is drafted
        self.node_s = self._target_s(0, FEWEST * self.count) / (FEWEST * self.count)
        self._first = self._rows = rows  # the list is made for the first, and plans for the others
        self._drafted: dict[Key, Drafted] = {}
        self._drafting = before or {}  # nodes of each draft, in the round before
        self._plain = self._planned(rows, list(map(Chosen.nothing, rows)))
        self._best: StepPlan | None = None  # at the price, of the first rows
        plain, drafts = self._plain.goodput, {row.source for row in rows if row.drafted_by_model}
        drafts |= {other.source for row in rows for other in row.others if other.drafted_by_model}
        self.price = max(price, plain)
        for turn in range(ROUNDS):
            found = self.plan(rows)
            last, self.price = self.price, max(self._earned(found), plain)
            settled = turn or len(drafts) < 2 or found.drafted == self._drafting
            if settled and abs(self.price - last) <= CLOSE * last:
                self.price, self._best = last, found
                break
            self._drafted.clear()
            self._drafting = found.drafted

    def hopeful(self, hope: float) -> PriceList:
        """Return the list for chains whose acceptance is so many standard errors higher."""
        prefill_tokens, own = self.read - len(self._rows), (self._rows, self.most, self.acceptance, self.latency)
        return PriceList(*own, price=self.price, hope=hope, prefill_tokens=prefill_tokens)

    def plain(self, rows: Sequence[RowView]) -> StepPlan:
        """Return the plan without drafted tokens."""
        return self._plain if rows is self._first else self._planned(rows, list(map(Chosen.nothing, rows)))

    def chains(self, rows: Sequence[RowView], lengths: Sequence[int]) -> StepPlan:
        """Return the plan in which each row's own source drafts a chain of this length, as far as it may."""
        if not rows:
            return self.plain(rows)
        own = [row.with_option(row.options[0]) for row in rows]
        survival = self.acceptance.of_rows(own)[..., 0].cumprod(1).tolist()
        chosen = []
        for row, survives, length in zip(own, survival, lengths, strict=True):
            depth = min(length, row.limit, self.most)
            chosen.append(Chosen(row, chain_shape(depth), sum(survives[:depth])) if depth else Chosen.nothing(row))
        return self._planned(rows, chosen)

    def plan(self, rows: Sequence[RowView], *, second: bool = False) -> StepPlan:
        """Return the best plan at the price. `second`: of each row's sources, the second best one."""
        if self._best is not None and rows is self._first and not second:
            return self._best
        self._rows = rows
        explored = self._explored(rows) if second else set[str]()
        offers = list(map(self._offers, rows))
        pairs = list(zip(rows, offers, strict=True))
        best = self._planned(rows, [choose(row, own, second=row.sequence_id in explored) for row, own in pairs])
        used = Counter([each.row.source for each in best.chosen if each.drafts])
        if second or not used or used.total() == len(rows) == max(used.values()):
            return best
        # A row's share of a draft's passes was that of a step in which all rows draft that can.
        able = Counter([offer.option.source for own in offers for offer in own if offer.option.drafted_by_model])
        dearer = [source for source, count in used.items() if count < able[source]] if len(used) > 1 else []
        others = [self._without(pairs, drafts) for drafts in (able, *([source] for source in dearer))]
        return max(best, *others, key=lambda plan: plan.expected.tokens - self.price * plan.expected.seconds)

    def _without(self, pairs: Sequence[tuple[RowView, Sequence[Offer]]], drafts: Collection[str]) -> StepPlan:
        """Return the best plan in which these drafts do not run."""
        return self._planned([row for row, _ in pairs], [choose(row, own, without=drafts) for row, own in pairs])

    def _planned(self, rows: Sequence[RowView], wished: Sequence[Chosen]) -> StepPlan:
        """Return the plan with the nodes of these choices that pay together."""
        chosen = self._trimmed(wished)
        nodes, context = sum([each.nodes for each in chosen]), sum([row.context_tokens for row in rows])
        seconds = self.latency.target.seconds(context, len(rows), len(rows)) + self._target_s(0, nodes)
        seconds += self._drafting_s(chosen)
        tokens = len(rows) + sum([each.tokens for each in chosen])
        return StepPlan(chosen, Expected(tokens, max(seconds, LEAST_S)))

    def _target_s(self, before: int, nodes: int) -> float:
        """Return the seconds that so many nodes add to the target's pass, behind `before` others."""
        table, read = self.latency.target, self.read + before
        return table.seconds(0, read + nodes) - table.seconds(0, read) if nodes else 0.0

    def _earned(self, plan: StepPlan) -> float:
        """Return the tokens a second of a plan, with what the reading of long texts takes of each step."""
        drafting = [(each.row, each.tokens) for each in plan.chosen if each.drafts]
        read_s = sum([self._paid_back_s(row, row.options[0], 1 + tokens) for row, tokens in drafting])
        return plan.expected.tokens / (plan.expected.seconds + read_s)

    def _explored(self, rows: Sequence[RowView]) -> set[str]:
        """Return the rows whose second best source may be tried: no long text is read for it, at most one short one."""
        reading_s = {row.sequence_id: sum(map(self._reading_s, row.options)) for row in rows}
        explored = {name for name, seconds in reading_s.items() if not seconds}
        behind = min([(seconds, name) for name, seconds in reading_s.items() if seconds], default=None)
        if behind is not None and behind[0] <= EXPLORED * self.plain(rows).expected.seconds:
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
        value = tokens - least * count - self.price * self.latency.draft_free_s / self.count
        return Offer(value, option._replace(likely=kept), kept.shape, tokens)

    def _tree(self, row: RowView, option: Option) -> Offer:
        """Return a source's tree for a row, the first one found for it. Those of all its rows are grown together."""
        key = _key(row, option)
        own = self._drafted.get(key)
        if own is None:
            self._grow(option)
            own = self._drafted.get(key)
        if own is None or own.shape.depth > option.limit or own.shape.nodes > self._room(option):
            every = sum([any(_is_like(one, option) for one in other.options) for other in self._rows])
            own = self._drafted[key] = self._grown([row], [option], every)[0]
        if not own.shape.depth:
            return Offer(NOTHING, option)
        tokens = own.tokens if option.likely is None else own.tokens * option.likely.missed
        seconds = own.seconds + self._paid_back_s(row, option, 1 + own.tokens)
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
        for row, option, tree in zip(rows, options, self._grown(rows, options, len(found)), strict=True):
            self._drafted[_key(row, option)] = tree

    def _likely(self, row: RowView) -> LikelyNodes | None:
        """Return the named nodes that a draft's tree would be behind."""
        named = [self._named(option) for option in row.options if option.limit and _names(option)]
        return next((offer.option.likely for offer in named if offer.value > NOTHING), None)

    def _grown(self, rows: Sequence[RowView], options: Sequence[Option], every: int) -> tuple[Drafted, ...]:
        """Return the best trees of one source for some rows, as if it drafted alike for `every` row that it can."""
        first, nodes = options[0], self.nodes if any(option.wide for option in options) else chains(self.nodes.depth)
        chances = self.acceptance.of_rows(list(map(RowView.with_option, rows, options)), hope=self.hope)
        gains = nodes.survival(numpy.minimum.accumulate(chances, 2))  # siblings are tried in turn
        limits = numpy.array([option.limit for option in options])
        gains *= nodes.depths <= limits[:, None]
        if not all(option.wide for option in options):
            gains *= nodes.spine | numpy.array([option.wide for option in options])[:, None]
        missed = numpy.array([1.0 if option.likely is None else option.likely.missed for option in options])
        times = max(1, round(every / len(rows)))
        before = sum([0 if option.likely is None else len(option.likely.chances) for option in options])
        latency = self.latency.of_draft(first.at_once, first.source)
        if not first.drafted_by_model:  # as if all rows drafted so
            latency = replace(latency, draft=None, draft_free_s=latency.draft_free_s * len(rows) / self.count)
        contexts = numpy.array([row.context_tokens for row in rows])
        further = self.read - len(rows) + times * before + self._beside(first.source)
        costs = DraftedCosts(latency, contexts, nodes.depth, further, nodes=times * len(nodes))
        return grow(nodes, within(gains, list(map(self._room, options))), missed, costs, self.price, times)

    def _beside(self, source: str) -> int:
        """Return the nodes that other drafts have in the last plan: they are in the same pass of the target."""
        return sum([nodes for name, nodes in self._drafting.items() if name != source])

    def _reading_s(self, option: Option) -> float:
        """Return the seconds in which a draft reads a text that it is far behind in."""
        return self.latency.reading_s(option.unread_tokens, option.source) if option.drafted_by_model else 0.0

    def _paid_back_s(self, row: RowView, option: Option, tokens: float) -> float:
        """Return what reading costs a step of so many tokens, where it pays in the steps that the row has left."""
        return self._reading_s(option) / min(PAYS_BACK, row.left / tokens)

    def _room(self, option: Option) -> int:
        """Return the most nodes of a draft's tree: the engine reserves places for a tree's, likely nodes included."""
        return max(self.most, len(self.nodes) - (0 if option.likely is None else len(option.likely.chances)))

    def _trimmed(self, chosen: Sequence[Chosen]) -> tuple[Chosen, ...]:
        """Return the rows with as many likely nodes as pay by the target's table, in which further ones may jump."""
        likely = [each.row.likely.chances if each.row.likely is not None else () for each in chosen]
        chances = sorted([chance for own in likely for chance in own], reverse=True)
        if not chances:
            return tuple(chosen)
        base = sum([each.shape.nodes for each in chosen if each.row.likely is None or each.joined])
        best, gained, kept = 0.0, 0.0, 0
        for number, chance in enumerate(chances, 1):
            gained += chance
            value = gained - self.price * self._target_s(base, number)
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
        free = any(each.row.likely is not None or (each.shape.depth and not each.drafts) for each in chosen)
        seconds = self.latency.draft_free_s * free
        for (at_once, source), own in drafting.items():
            work = [(each.row.context_tokens, each.shape.reads) for each in own]
            seconds += self.latency.of_draft(at_once, source).trees_s(work)
        return seconds


def _key(row: RowView, option: Option) -> Key:
    return row.sequence_id, option.source, option.match, option.likely is not None


def _is_like(option: Option, other: Option) -> bool:
    return option.limit > 0 and option.source == other.source and option.drafted_by_model == other.drafted_by_model


def _names(option: Option) -> bool:
    """Return True for a source that names its nodes."""
    return option.likely is not None and not option.drafted_by_model
