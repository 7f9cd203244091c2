"""Decisions at a price: of steps in whose rows sources name their nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distillspec.serving.base.acceptance import RowResult, ranked_of_source
from distillspec.serving.base.likely import FEW_ROWS
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView, is_joined
from distillspec.serving.control.allocation import Allocation
from distillspec.serving.control.candidates import Candidates
from distillspec.serving.control.decision import Decision, Known, Mode, catch_up_s
from distillspec.serving.control.grown_trees import NO_TREE
from distillspec.serving.control.held_plan import HELD
from distillspec.serving.control.named_rest import NamedRest
from distillspec.serving.control.offers import PricedPlan
from distillspec.serving.control.priced import PriceList

# What is never tried is not known: after so many price lists rows take the second best of their sources for a step.
SECOND_EVERY = 8
USUAL = 0.05  # weight of a step in the running mean of what plans promise


class PricedSteps:
    """Decides with a price list that steps share. One is made anew after some steps, and when rows come or go.

    Args:
        most: the most levels of a row.
        trees: the nodes that a draft's trees may have, None for chains.
    """

    def __init__(self, most: int, trees: Candidates | None) -> None:
        self.most, self.trees = most, trees
        self.used = False  # rows have had sources that name their nodes
        self._list: PriceList | None = None
        self._until, self._names, self._lists = 0, list[str](), 0
        # Goodput of priced plans over that of plain steps. Plans differ from step to step, so speculation is judged by
        # the running mean. It is a ratio, which says something of other numbers of rows too. 0: nothing was planned.
        self._usual = 0.0
        # A token costs more beside many rows, and a plan takes less of a step.
        self._rest_of_few, self._rest_of_many = NamedRest(), NamedRest()

    def step(self, rows: int) -> None:
        """Count a step of so many rows."""
        self._rest(rows).step()

    def awake(self, view: BatchView) -> BatchView:
        """Return the view, without the sources that name their nodes while they rest."""
        if not self._rest(len(view.rows)).rests:
            return view
        return replace(view, rows=tuple(map(without_named, view.rows)))

    def applies(self, rows: Sequence[RowView]) -> bool:
        """Return True from the first step on in which a source names its nodes."""
        self.used = self.used or any(map(names_nodes, rows))
        return self.used

    def drop(self) -> None:
        """Forget the list, and end a rest: the draft, or the costs, are others."""
        self._list, self._usual = None, 0.0
        self._rest_of_few.drop()
        self._rest_of_many.drop()

    def decide(self, view: BatchView, known: Known) -> Decision:
        """Decide with a new list."""
        own = (view.rows, self.most, known.acceptance, known.latency)
        prices = self._list = PriceList(*own, trees=self.trees, price=known.price)
        self._until, self._names = known.step + HELD, [row.sequence_id for row in view.rows]
        self._lists += 1
        return self._decided(view, known, prices, second=self._lists % SECOND_EVERY == 0)

    def decide_again(self, view: BatchView, known: Known) -> Decision | None:
        """Decide with the last list, if that is good for this step too."""
        prices, policy = self._list, known.policy
        if prices is None or view.prefill_tokens or not policy.speculates or policy.plain_is_due:
            return None
        if known.step >= self._until or [row.sequence_id for row in view.rows] != self._names:
            return None
        return self._decided(view, known, prices)

    def learn(self, result: StepResult, why: Decision, tokens: tuple[int, float] | None) -> float:
        """Learn what planning takes where sources name their nodes. Return the seconds that a step counts for.

        Those of a plain step are without planning: where sources rest, one plan holds for many steps.

        Args:
            tokens: written and expected ones of a step that speculated, None for a plain one.
        """
        rows, seconds = result.view.rows, result.total_s - result.readings_s
        rest, named = self._rest(len(rows)), any(map(names_nodes, rows))
        if tokens is None:
            return seconds - result.planning_s if named else seconds
        rest.wrote(tokens[1], tokens[0], named=any(row.likely is not None for row in why.rows))
        if seconds > 0 and not result.prefill_tokens:
            outside_s = seconds - result.target_s - result.draft_s
            if rest.rests:
                rest.rested(outside_s)
            elif named:
                rest.took(result.planning_s, outside_s, seconds)
        return seconds

    def _rest(self, rows: int) -> NamedRest:
        return self._rest_of_few if rows <= FEW_ROWS else self._rest_of_many

    def _weigh(self, rows: Sequence[RowView], gain: float) -> None:
        """Let the sources that name their nodes rest, if they have brought less than they cost."""
        if any(map(names_nodes, rows)) and not self._rest(len(rows)).weigh(gain):
            self.used = False

    def _decided(self, view: BatchView, known: Known, prices: PriceList, *, second: bool = False) -> Decision:
        found, plain = prices.plan(view.rows, second=second), prices.plain(view.rows)
        if not second:
            self._weigh(view.rows, found.gain)
        mode = _mode(view, found, plain, known)
        best, nothing = found.allocation.goodput, plain.goodput
        if nothing:
            self._usual += USUAL * (best / nothing - self._usual) if self._usual else best / nothing
        drafts = mode in ("speculating", "trial")
        rows = tuple([each.row for each in found.chosen]) if drafts else without_likely(view.rows)
        shapes = tuple([each.shape if drafts else NO_TREE for each in found.chosen])
        planned = found.allocation if drafts else plain
        return known.decision(
            mode, replace(view, rows=rows), shapes, planned, (nothing, best), promised=nothing * self._usual
        )


def _mode(view: BatchView, found: PricedPlan, plain: Allocation, known: Known) -> Mode:
    policy, best = known.policy, found.allocation
    if not any(row.limit or row.others for row in view.rows):
        return "nothing to draft for"
    if not best.nodes or best.goodput <= plain.goodput:
        return "not worth it"
    if policy.speculates:
        return "measuring plain" if policy.plain_is_due else "speculating"
    reading_s = catch_up_s(known.latency, [each.row for each in found.chosen], best.lengths.tolist())
    return "trial" if policy.trial_is_due and policy.affords(best, plain, reading_s) else "not worth it"


def names_nodes(row: RowView) -> bool:
    """Return True if any of the row's sources names its nodes."""
    return row.likely is not None or any(option.likely is not None for option in row.others)


def without_named(row: RowView) -> RowView:
    """Return the row without the sources that name their nodes."""
    if not names_nodes(row):
        return row
    own = [option for option in row.options if option.likely is None]
    if not own:
        return row._replace(limit=0, match=0, likely=None)
    return row.with_option(own[0])._replace(others=tuple(own[1:]))


def without_likely(rows: Sequence[RowView]) -> tuple[RowView, ...]:
    """Return the rows as if no source named its nodes."""
    if not any(map(names_nodes, rows)):
        return tuple(rows)
    others = [tuple([other._replace(likely=None) for other in row.others]) for row in rows]
    return tuple([row._replace(likely=None, others=own) for row, own in zip(rows, others, strict=True)])


def trials_of_drafts(views: Sequence[RowView], rows: Sequence[RowResult]) -> Sequence[RowResult]:
    """Return the rows with the trials that acceptance is learnt from, without those of sources that name their nodes.

    Args:
        views: as they were planned for.
    """
    named = {row.sequence_id: row for row in views if row.likely is not None}
    if not named:
        return rows
    pairs = [(row, named.get(row.sequence_id)) for row in rows]
    return [
        row if view is None else row._replace(trials=ranked_of_source(row.trials, view.source))
        for row, view in pairs
        if view is None or is_joined(view)
    ]
