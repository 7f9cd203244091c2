"""The plan that steps reuse: planning takes 4 % of a small step, and most plans come out as the one before.

A step takes the plan of the one before it as it is. Likely nodes of sources change with every step, so where there are
any, steps share the planner alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.control.decision import Decision, sources_of
from distillspec.serving.planning.offers import Offer, by_source
from distillspec.serving.planning.step_planner import StepPlanner

HOLD_STEPS, MOST_HOLD_STEPS = 8, 32  # that one plan is used for: at first, and after plans that were all alike
# Costs of passes larger than those that are run are never corrected, and late positions seldom tried. So the first plan
# after so many speculating steps drafts a token more a row.
EXPLORE_EVERY = 20
# Steps of a plan that would pay by an optimistic acceptance. Finding it takes as long as several others.
OPTIMISTIC_PLAN_STEPS = 4


class ReusedPlan:
    """The last step's plan and planner, and the step up to which others reuse them.

    A plan that comes out as the one before holds twice as long as that one, up to a bound. So does one that drafts
    nothing beside the same rows. A planner holds `HOLD_STEPS` steps, until rows come or go. Where rows have bounds on
    the time per token, so does a plan: passes take longer as texts grow.

    Attributes:
        plan: None: the next step is planned for.
    """

    def __init__(self) -> None:
        self.drop()
        self._until_step = 0

    def drop(self) -> None:
        """Forget the plan and those before: the draft, or the costs, are others."""
        self.plan: Plan | None = None
        self._last_best: Decision | None = None  # that took the best plan, and speculated
        self._replaced: Decision | None = None  # by that of `plan`
        # A planner, with the rows and the step it was made for.
        self._kept: tuple[StepPlanner, list[str], int] | None = None
        self._last_plain: Decision | None = None  # the last one, if it drafted nothing
        self._hold_steps = self._plain_hold_steps = HOLD_STEPS
        self._unexplored = 0  # speculating steps since the last one that explored

    @property
    def explores(self) -> bool:
        """True where the next plan that speculates should draft more than the best one."""
        return self._unexplored >= EXPLORE_EVERY

    def observe(self, result: StepResult, step: int) -> bool:
        """Note the step of this number. A plan that speculates holds on if no prompts were read in it.

        On a GPU a step is planned before the previous one is observed. Results of a decision that was already replaced
        are ignored.

        Returns:
            True for the first step of a decision.
        """
        current = None if self.plan is None else self.plan.why.origin
        if not isinstance(why := result.plan.why, Decision):
            self.plan = None
            return False
        self._unexplored = 0 if why.mode == "exploring" else self._unexplored + why.is_best
        ends = result.prefill_tokens > 0 and not why.is_plain
        if why.origin is self._replaced and not ends:
            return False
        self.plan = None if ends else result.plan
        if why.origin is current:
            return False
        self._replaced = current
        self._renew(why, step)
        return True

    def decision(self, step: int) -> Decision | None:
        """Return the decision that holds for the step of this number, None where it is to be planned for."""
        why: Decision | None = None if self.plan is None or step >= self._until_step else self.plan.why
        return why

    def drafted(self, rows: Sequence[RowView]) -> Counter[str] | None:
        """Return the nodes of each source in the last plan that speculated, None if it was not for these rows."""
        last = self._last_best
        if last is None or sources_of(last.rows) != sources_of(rows):
            return None
        chosen = zip(last.rows, last.shapes, strict=True)
        return by_source([(row.source, Offer(row, shape).nodes) for row, shape in chosen])

    def keep(self, planner: StepPlanner, rows: Sequence[RowView], step: int) -> None:
        """Keep a planner made at the step of this number for those after it."""
        self._kept = planner, _sequence_ids(rows), step

    def planner(self, view: BatchView, step: int) -> StepPlanner | None:
        """Return the planner of an earlier step that is good for this one too. None is that counts prompt tokens."""
        if self._kept is None or view.prefill_tokens:
            return None
        planner, sequence_ids, made = self._kept
        good = (
            made < step < made + HOLD_STEPS
            and not planner.costs.prefill_tokens
            and sequence_ids == _sequence_ids(view.rows)
        )
        return planner if good else None

    def _renew(self, decision: Decision, step: int) -> None:
        if decision.is_best:
            self._hold_steps = steps = _next_hold_steps(self._hold_steps, decision, self._last_best)
            self._last_best = decision
        elif decision.is_plain:
            self._plain_hold_steps = steps = _next_hold_steps(self._plain_hold_steps, decision, self._last_plain)
        else:
            steps = OPTIMISTIC_PLAN_STEPS if decision.is_optimistic else HOLD_STEPS
        self._last_plain = decision if decision.is_plain else None
        self._until_step = step + (min(steps, HOLD_STEPS) if decision.is_bounded else steps)


def _next_hold_steps(steps: int, decision: Decision, before: Decision | None) -> int:
    """Return the steps that a decision holds, where the one before held `steps`."""
    if before is None or decision.shapes != before.shapes or sources_of(decision.rows) != sources_of(before.rows):
        return HOLD_STEPS
    return min(2 * steps, MOST_HOLD_STEPS)


def _sequence_ids(rows: Sequence[RowView]) -> list[str]:
    return [row.sequence_id for row in rows]
