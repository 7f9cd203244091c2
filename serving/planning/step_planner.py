"""Planner of steps at a price of a second in tokens, row by row.

A node, or a pass of a draft, pays where the tokens expected of it exceed its cost at the price. The best price is the
goodput that it leads to (Dinkelbach 1967). It changes slowly, while the likely nodes of sources change with every step:
so a price may be kept for some steps, and each of them is planned for in microseconds a row.

Each source's trees are grown for all rows of a step together. To choose among sources, a row is charged its share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

import numpy

from distillspec.serving.base.candidates import Candidates, chains
from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.rows import Option, RowView, is_joined
from distillspec.serving.base.shape import chain_shape
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.chain_batch import Expected
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.step_costs import StepCosts
from distillspec.serving.planning.best_trees import Drafted, best_trees, within
from distillspec.serving.planning.offers import Offer, StepPlan, choose

FEW_NODES_A_ROW = 4  # over which the cost of one is taken
PRICE_ROUNDS = 3  # in which a price is looked for
PRICE_TOLERANCE = 0.02  # relative difference of a price from the goodput that it leads to, at which it is taken
EXPLORED_READING_STEPS = 0.5  # plain steps that reading a text may take, so that its draft is explored

Key = tuple[str, str, int, bool]  # of a tree: sequence, source, match, and whether it is behind likely nodes


class StepPlanner:
    """Plans steps at a price, by costs and acceptance as they were known at one of them.

    Args:
        rows: of the step. Other steps of the same rows may be planned for too.
        most: the most levels of a row.
        trees: the nodes that a draft's trees may have, None for chains.
        optimism_se: see `AcceptanceEstimate.chances`.
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
        optimism_se: float = 0.0,
        prefill_tokens: int = 0,
        before: Mapping[str, int] | None = None,
    ) -> None:
        self.most = most
        self.acceptance = acceptance
        self.latency = latency
        self.optimism_se = optimism_se
        self.price = 0.0  # until `at_best_price`
        self.nodes = chains(most) if trees is None else trees
        self.costs = StepCosts(latency, len(rows), prefill_tokens)
        few_nodes = FEW_NODES_A_ROW * max(1, len(rows))
        self.node_s = self.costs.nodes_s(few_nodes) / few_nodes
        self._first_rows = rows
        self._first_plain = self._planned(list(map(Offer.nothing, rows)))
        self._first_best: StepPlan | None = None  # once the price is settled
        self._drafted: dict[Key, Drafted] = {}
        self._drafting = before or {}  # nodes of each draft, in the round before

    def at_best_price(self, start: float = 0.0) -> StepPlanner:
        """Set the price to what the best plan for the rows earns, looked for in a few rounds. Return the planner.

        Args:
            start: the first price, at least that of plain decoding.
        """
        rows, plain = self._first_rows, self._first_plain.goodput
        drafts = {option.source for row in rows for option in row.options if option.drafted_by_model}
        self.price = max(start, plain)
        for turn in range(PRICE_ROUNDS):
            best = self.plan(rows)
            last, self.price = self.price, max(self._earned(best), plain)
            settled = turn or len(drafts) < 2 or best.drafted == self._drafting
            if settled and abs(self.price - last) <= PRICE_TOLERANCE * last:
                self.price = last
                self._first_best = best
                break
            self._drafted.clear()
            self._drafting = best.drafted
        return self

    def with_optimism(self, rows: Sequence[RowView], se: float) -> StepPlanner:
        """Return a planner of chains for these rows, whose acceptance is so many standard errors higher."""
        optimistic = StepPlanner(
            rows,
            self.most,
            self.acceptance,
            self.latency,
            optimism_se=se,
            prefill_tokens=self.costs.prefill_tokens,
        )
        return optimistic.at_best_price(self.price)

    def plain(self, rows: Sequence[RowView]) -> StepPlan:
        """Return the plan without drafted tokens."""
        return self._first_plain if rows is self._first_rows else self._planned(list(map(Offer.nothing, rows)))

    def chains(self, rows: Sequence[RowView], lengths: Sequence[int]) -> StepPlan:
        """Return the plan in which each row's own source drafts a chain of this length, as far as it may."""
        if not rows:
            return self.plain(rows)
        alone = [row.with_option(row.own) for row in rows]
        survival = self.acceptance.of_rows(alone)[..., 0].cumprod(1).tolist()
        chosen = []
        for row, survives, length in zip(alone, survival, lengths, strict=True):
            depth = min(length, row.limit, self.most)
            chosen.append(Offer(row, chain_shape(depth), sum(survives[:depth])) if depth else Offer.nothing(row))
        return self._planned(chosen)

    def plan(self, rows: Sequence[RowView], *, second: bool = False) -> StepPlan:
        """Return the best plan at the price. `second`: of each row's sources, the second best one."""
        if self._first_best is not None and rows is self._first_rows and not second:
            return self._first_best
        explored = self._explored(rows) if second else set[str]()
        offers = [self._offers(row, rows) for row in rows]

        def planned(without: Collection[str] = ()) -> StepPlan:
            pairs = zip(rows, offers, strict=True)
            chosen = [choose(row, each, without, second=row.sequence_id in explored) for row, each in pairs]
            return self._planned(chosen)

        best = planned()
        used = Counter([each.row.source for each in best.chosen if each.drafts])
        if second or not used or used.total() == len(rows) == max(used.values()):
            return best
        # A row's share of a draft's passes was that of a step in which all rows draft that can.
        by_row = [{offer.row.source for offer in each if offer.row.drafted_by_model} for each in offers]
        able = Counter([source for sources in by_row for source in sources])
        dearer = [source for source, count in used.items() if count < able[source]] if len(used) > 1 else []
        others = [planned(drafts) for drafts in (able, *([source] for source in dearer))]
        return max(best, *others, key=lambda plan: plan.expected.tokens - self.price * plan.expected.seconds)

    def _planned(self, wished: Sequence[Offer]) -> StepPlan:
        """Return the plan with the nodes of these choices that pay together."""
        chosen = self._trimmed(wished)
        seconds = self.costs.step_s([(each.row, each.shape) for each in chosen], sum([each.nodes for each in chosen]))
        return StepPlan(chosen, Expected(len(chosen) + sum([each.tokens for each in chosen]), seconds))

    def _trimmed(self, chosen: Sequence[Offer]) -> tuple[Offer, ...]:
        """Return the rows with as many likely nodes as pay by the target's table, in which further ones may jump."""
        likely = [each.row.likely.chances if each.row.likely is not None else () for each in chosen]
        chances = sorted([chance for nodes in likely for chance in nodes], reverse=True)
        if not chances:
            return tuple(chosen)
        base = sum([each.shape.nodes for each in chosen if each.row.likely is None or each.row.drafted_by_model])
        gains = enumerate(accumulate(chances), 1)
        values = [0.0, *[gained - self.price * self.costs.nodes_s(number, base) for number, gained in gains]]
        kept = values.index(max(values))
        least = chances[kept - 1] if kept else 2.0
        counts = [sum([chance >= least for chance in nodes]) for nodes in likely]
        return tuple([each.first(count) for each, count in zip(chosen, counts, strict=True)])

    def _earned(self, plan: StepPlan) -> float:
        """Return the tokens a second of a plan, with what the reading of long texts takes of each step."""
        rows = [(each.row, each.row.room / (1 + each.tokens)) for each in plan.chosen if each.drafts]
        read_s = sum([self.costs.paid_back_s(row, left) for row, left in rows])
        return plan.expected.tokens / (plan.expected.seconds + read_s)

    def _explored(self, rows: Sequence[RowView]) -> set[str]:
        """Return the rows whose second best source may be tried: no long text is read for it, at most one short one."""
        reading_s = {row.sequence_id: sum(map(self.costs.reading_s, row.options)) for row in rows}
        explored = {name for name, seconds in reading_s.items() if not seconds}
        behind = min([(seconds, name) for name, seconds in reading_s.items() if seconds], default=None)
        if behind is not None and behind[0] <= EXPLORED_READING_STEPS * self.plain(rows).expected.seconds:
            explored.add(behind[1])
        return explored

    def _offers(self, row: RowView, rows: Sequence[RowView]) -> list[Offer]:
        """Return what may be drafted for one of the rows, best first.

        That is the tree of one source, or the likely nodes of one with a draft's tree behind them.
        """
        able = [option for option in row.options if option.limit]
        alone = [
            self._likely_offer(row, option) if _has_likely_nodes(option) else self._tree(row, option, rows)
            for option in able
        ]
        offers = [offer for offer in alone if offer is not None]
        for first in [offer for offer in offers if offer.row.likely is not None]:
            joined = [option._replace(likely=first.row.likely) for option in able if option.drafted_by_model]
            behind = [self._tree(row, option, rows) for option in joined]
            offers += [
                offer._replace(value=first.value + offer.value, tokens=first.tokens + offer.tokens)
                for offer in behind
                if offer is not None
            ]
        return sorted(offers, key=lambda offer: -offer.value)

    def _likely_offer(self, row: RowView, option: Option) -> Offer | None:
        """Return a source's likely nodes that pay, each by itself, None without any."""
        likely, least = option.likely, self.price * self.node_s
        count = 0 if likely is None else sum([chance > least for chance in likely.chances])
        if likely is None or not count:
            return None
        kept = likely.first(count)
        value = kept.tokens - least * count - self.price * self.latency.draft_free_s / max(1, self.costs.rows)
        return Offer(row.with_option(option._replace(likely=kept)), kept.shape, kept.tokens, value)

    def _tree(self, row: RowView, option: Option, rows: Sequence[RowView]) -> Offer | None:
        """Return a source's tree for one of the rows, the first one found for it, None where none pays."""
        key = _key(row, option)
        if key not in self._drafted:
            self._find_trees(option, rows)
        drafted = self._drafted[key]
        if drafted.shape.depth > option.limit or drafted.shape.nodes > self._room(option):
            self._find_trees(option, rows, only=row)
            drafted = self._drafted[key]
        if not drafted.shape.depth:
            return None
        tokens = drafted.tokens if option.likely is None else drafted.tokens * option.likely.missed
        seconds = drafted.seconds + self.costs.paid_back_s(option, row.room / (1 + drafted.tokens))
        return Offer(row.with_option(option), drafted.shape, tokens, tokens - self.price * seconds)

    def _find_trees(self, like: Option, rows: Sequence[RowView], only: RowView | None = None) -> None:
        """Find the trees of a source, alone or behind likely nodes, for all rows of the step together, or for one."""
        drafting = [(row, option) for row in rows for option in row.options if _is_like(option, like)]
        drafting_rows = len(drafting)
        if only is not None:
            drafting = [(only, like)]
        elif is_joined(like):
            behind = [(row, option, self._likely(row)) for row, option in drafting]
            drafting = [(row, option._replace(likely=likely)) for row, option, likely in behind if likely is not None]
        wanted, options = zip(*drafting, strict=True)
        found = self._trees_of(wanted, options, drafting_rows)
        self._drafted.update(zip(map(_key, wanted, options), found, strict=True))

    def _likely(self, row: RowView) -> LikelyNodes | None:
        """Return the likely nodes that a draft's tree would be behind."""
        offers = [
            self._likely_offer(row, option) for option in row.options if option.limit and _has_likely_nodes(option)
        ]
        return next((offer.row.likely for offer in offers if offer is not None), None)

    def _trees_of(self, rows: Sequence[RowView], options: Sequence[Option], drafting_rows: int) -> tuple[Drafted, ...]:
        """Return the best trees of one source for some rows, as if it drafted alike for so many rows."""
        first, wide = options[0], numpy.array([option.wide for option in options])
        nodes = self.nodes if wide.any() else chains(self.nodes.depth)
        chances = self.acceptance.of_rows(list(map(RowView.with_option, rows, options)), optimism_se=self.optimism_se)
        gains = nodes.survival(numpy.minimum.accumulate(chances, 2))  # siblings are tried in turn
        gains *= nodes.depths <= numpy.array([option.limit for option in options])[:, None]
        gains *= nodes.spine | wide[:, None]
        missed = numpy.array([1.0 if option.likely is None else option.likely.missed for option in options])
        times = max(1, round(drafting_rows / len(rows)))
        # Those of other drafts in the last plan are in the same pass of the target.
        further = sum([count for source, count in self._drafting.items() if source != first.source])
        further += times * sum(map(_before, options))
        costs = self.costs.of_trees(rows, first, nodes.depth, times * len(nodes), further)
        return best_trees(nodes, within(gains, list(map(self._room, options))), missed, costs, self.price, times)

    def _room(self, option: Option) -> int:
        """Return the most nodes of a draft's tree: the engine reserves places for a tree's, likely nodes included."""
        return max(self.most, len(self.nodes) - _before(option))


def _key(row: RowView, option: Option) -> Key:
    return row.sequence_id, option.source, option.match, option.likely is not None


def _is_like(option: Option, other: Option) -> bool:
    return option.limit > 0 and option.source == other.source and option.drafted_by_model == other.drafted_by_model


def _has_likely_nodes(option: Option) -> bool:
    """Return True for a source with likely nodes."""
    return option.likely is not None and not option.drafted_by_model


def _before(option: Option) -> int:
    """Return the likely nodes that a draft's tree is behind."""
    return 0 if option.likely is None else len(option.likely.chances)
