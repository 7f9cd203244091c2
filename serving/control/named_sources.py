"""Sources that name their nodes: price lists that steps share, and what such sources bring and cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distillspec.serving.base.acceptance import RowResult, ranked_of_source
from distillspec.serving.base.likely import FEW_ROWS
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView, is_joined, names_nodes
from distillspec.serving.control.decision import Decision
from distillspec.serving.control.held_plan import HELD
from distillspec.serving.control.named_rest import NamedRest
from distillspec.serving.control.offers import StepPlan
from distillspec.serving.control.price_list import PriceList

# What is never tried is not known: after so many steps rows take the second best of their sources for one.
SECOND_EVERY = 64
USUAL = 0.05  # weight of a step in the running mean of what plans promise


class NamedSources:
    """Keeps a price list for some steps, until rows come or go, since named nodes change with every step.

    Attributes:
        used: rows have had sources that name their nodes.
    """

    def __init__(self) -> None:
        self.used = False
        self._list: PriceList | None = None
        self._until, self._names = 0, list[str]()
        self._second_at: int | None = None  # the step in which second best sources were tried last
        # Goodput of plans over that of plain steps. Plans differ from step to step, so speculation is judged by the
        # running mean. It is a ratio, which says something of other numbers of rows too. 0: nothing was planned.
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

    def keep(self, prices: PriceList, view: BatchView, step: int) -> bool:
        """Keep a list made at the step of this number. Return True where its rows are to try their second best source.

        One that counts prompt tokens is not kept.
        """
        self._list, self._names = prices, [row.sequence_id for row in view.rows]
        self._until = step if view.prefill_tokens else step + HELD
        if self._second_at is None:
            self._second_at = step - 1  # none is tried with the first list
        if step >= self._second_at + SECOND_EVERY:
            self._second_at = step
        return step == self._second_at

    def kept(self, view: BatchView, step: int) -> PriceList | None:
        """Return the last list, if that is good for this step too."""
        if self._list is None or view.prefill_tokens or step >= self._until:
            return None
        return self._list if [row.sequence_id for row in view.rows] == self._names else None

    def promise(self, best: StepPlan, plain: StepPlan, *, usual: bool = True) -> float:
        """Return the tokens a second that plans usually promise, where a plain step has those of `plain`.

        Args:
            usual: False for a plan that is not the best one. It says nothing of others.
        """
        if plain.goodput and (usual or not self._usual):
            ratio = best.goodput / plain.goodput
            self._usual += USUAL * (ratio - self._usual) if self._usual else ratio
        return plain.goodput * self._usual

    def weigh(self, rows: Sequence[RowView], gain: float) -> None:
        """Let the sources that name their nodes rest, if they have brought less than they cost."""
        if any(map(names_nodes, rows)) and not self._rest(len(rows)).weigh(gain):
            self.used = False

    def learn(self, result: StepResult, why: Decision, tokens: tuple[int, float] | None) -> float:
        """Learn what planning takes where sources name their nodes. Return the seconds that a step counts for.

        Those of a plain step are without planning: where sources rest, one plan holds for many steps.

        Args:
            tokens: written and expected ones of a step that speculated, None for a plain one.
        """
        rows, seconds = result.view.rows, result.total_s - result.readings_s
        rest, named = self._rest(len(rows)), any(map(names_nodes, rows))
        tells = seconds > 0 and not result.prefill_tokens  # what planning takes
        if tells and named and not rest.rests:
            rest.planned(result.planning_s / seconds)
        if tokens is None:
            return seconds - result.planning_s if named else seconds
        rest.wrote(tokens[1], tokens[0], named=any(row.likely is not None for row in why.rows))
        outside_s = seconds - result.target_s - result.draft_s
        if tells and rest.rests:
            rest.rested(outside_s)
        elif tells and named:
            rest.took(outside_s, seconds)
        return seconds

    def _rest(self, rows: int) -> NamedRest:
        return self._rest_of_few if rows <= FEW_ROWS else self._rest_of_many


def without_named(row: RowView) -> RowView:
    """Return the row without the sources that name their nodes."""
    if not names_nodes(row):
        return row
    own = [option for option in row.options if option.likely is None]
    if not own:
        return row._replace(limit=0, match=0, likely=None)
    return row.with_option(own[0])._replace(others=tuple(own[1:]))


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
