"""Sources with likely nodes: what they bring and cost, and when they are left out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distillspec.serving.base.likely import FEW_ROWS
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView, has_likely_nodes, without_likely
from distillspec.serving.control.decision import Decision
from distillspec.serving.control.likely_sources_rest import LikelySourcesRest
from distillspec.serving.planning.offers import StepPlan

# What is never tried is not known: after so many steps rows take the second best of their sources for one.
SECOND_EVERY = 64
PROMISE_WEIGHT = 0.05  # of a step in the running mean of what plans promise


class LikelySources:
    """Follows what sources with likely nodes promise, bring and cost. They rest where they do not pay.

    Attributes:
        used: rows have had such sources.
    """

    def __init__(self) -> None:
        self.used = False
        self._second_at: int | None = None  # the step in which second best sources were tried last
        # Goodput of plans over that of plain steps. Plans differ from step to step, so speculation is judged by the
        # running mean. It is a ratio, which says something of other numbers of rows too. 0: nothing was planned.
        self._promised_ratio = 0.0
        # Learnt apart: beside many rows a token costs more, and planning takes less of a step.
        self._rest_of_few, self._rest_of_many = LikelySourcesRest(), LikelySourcesRest()

    def drop(self) -> None:
        """Forget what plans promise, and end a rest: the draft, or the costs, are others."""
        self._promised_ratio = 0.0
        self._rest_of_few.drop()
        self._rest_of_many.drop()

    def awake(self, view: BatchView) -> BatchView:
        """Return the view, without the sources with likely nodes while they rest."""
        if not self._rest(len(view.rows)).rests:
            return view
        return replace(view, rows=tuple(map(without_likely, view.rows)))

    def apply(self, rows: Sequence[RowView]) -> bool:
        """Return True from the first step on in which a source has likely nodes."""
        return self.used or any(map(has_likely_nodes, rows))

    def second_is_due(self, step: int) -> bool:
        """Return True where rows are to try their second best source: not in the first step that asks."""
        if self._second_at is None:
            self._second_at = step - 1
        if step >= self._second_at + SECOND_EVERY:
            self._second_at = step
        return step == self._second_at

    def promised_ratio(self, best: StepPlan, plain: StepPlan, *, second: bool) -> float:
        """Return the running mean of the goodput that plans promise over that of plain steps, this one included.

        Args:
            second: the plan is not the best one. It says nothing of others.
        """
        mean = self._promised_ratio
        if not plain.goodput or (second and mean):
            return mean
        ratio = best.goodput / plain.goodput
        return mean + PROMISE_WEIGHT * (ratio - mean) if mean else ratio

    def decided(self, why: Decision, rows: Sequence[RowView]) -> None:
        """Learn from a decision, once. The sources rest if they have brought less than they cost.

        Args:
            rows: of its step.
        """
        if why.promised_ratio is None:
            return
        rest = self._rest(len(rows))
        self._promised_ratio = why.promised_ratio
        self.used = self.used or (not rest.rests and any(map(has_likely_nodes, rows)))
        if why.gain is not None:
            self.used = rest.weigh(why.gain)

    def step(self, rows: int) -> None:
        """Count a step of so many rows."""
        self._rest(rows).step()

    def learn(self, result: StepResult, why: Decision, tokens: tuple[int, float] | None) -> float:
        """Learn what planning takes where sources have likely nodes. Return the seconds that a step counts for.

        Those are without planning, since one plan holds for many steps, and a step that measures plain decoding is
        always planned for. Only where sources have likely nodes is each step that speculates planned for too.

        Args:
            tokens: written and expected ones of a step that speculated, None for a plain one.
        """
        rows, seconds = result.view.rows, result.total_s - result.readings_s
        rest, likely = self._rest(len(rows)), any(map(has_likely_nodes, rows))
        tells = seconds > 0 and not result.prefill_tokens  # what planning takes
        if tells and likely and not rest.rests:
            rest.planned(result.planning_s / seconds)
        if tokens is None:
            return seconds - result.planning_s
        rest.wrote(tokens[1], tokens[0], likely=any(row.likely is not None for row in why.rows))
        outside_s = seconds - result.target_s - result.draft_s
        if tells and rest.rests:
            rest.rested(outside_s)
        elif tells and likely:
            rest.took(outside_s, seconds)
        return seconds if likely else seconds - result.planning_s

    def _rest(self, rows: int) -> LikelySourcesRest:
        return self._rest_of_few if rows <= FEW_ROWS else self._rest_of_many
