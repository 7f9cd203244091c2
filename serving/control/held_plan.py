"""The plan that steps share: planning takes 4 % of a small step, and most plans come out as the one before."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import RowView
from distillspec.serving.control.decision import Decision
from distillspec.serving.control.offers import by_source

HELD, MOST_HELD = 8, 32  # steps that one plan holds for: at first, and after plans that were all alike
HOPED = (
    4  # steps of a plan that would pay if acceptance were what it may be: finding it takes as long as several others
)


class HeldPlan:
    """The last step's plan, and the step up to which others take it too.

    A plan that comes out as the one before holds twice as long as that one, up to a bound.

    Attributes:
        plan: None: the next step is planned for.
        unexplored: speculating steps since the last one that explored.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.unexplored = 0
        self._before: Decision | None = None  # the last one that speculated
        self._displaced: Decision | None = None  # by that of `plan`
        self._held, self._until = HELD, 0

    def observe(self, result: StepResult, step: int) -> None:
        """Note the step of this number. A plan holds on if no prompts were read in it.

        Where a step is planned for before the one before it has ended, two plans are made in a row, and the first one's
        further steps end after the second one has displaced it.
        """
        before, why = None if self.plan is None else self.plan.why, result.plan.why
        if isinstance(why, Decision):
            self.unexplored = 0 if why.mode == "exploring" else self.unexplored + (why.mode == "speculating")
            if why is self._displaced and not result.prefill_tokens:
                return
        self.plan = result.plan if isinstance(why, Decision) and not result.prefill_tokens else None
        if isinstance(why, Decision) and why is not before:
            self._displaced = before
            self._renew(why, step)

    def drop(self) -> None:
        """Forget the plan and those before: the draft, or the costs, are others."""
        self.plan = self._before = self._displaced = None
        self._held, self.unexplored = HELD, 0

    def decision(self, step: int) -> Decision | None:
        """Return the decision that holds for the step of this number, None where it is to be planned for."""
        if self.plan is None or step >= self._until:
            return None
        return self.plan.why if isinstance(self.plan.why, Decision) else None

    def drafted(self, rows: Sequence[RowView]) -> Counter[str] | None:
        """Return the nodes of each source in the last plan that speculated, None if it was not for these rows."""
        before = self._before
        if before is None or _sources(before.rows) != _sources(rows):
            return None
        return by_source([(row.source, shape.nodes) for row, shape in zip(rows, before.shapes, strict=True)])

    def _renew(self, decision: Decision, step: int) -> None:
        if decision.mode != "speculating":
            self._until = step + (HOPED if decision.mode == "hoped" else HELD)
            return
        self._held = min(2 * self._held, MOST_HELD) if self._is_alike(decision) else HELD
        self._before, self._until = decision, step + self._held

    def _is_alike(self, decision: Decision) -> bool:
        before = self._before
        return before is not None and decision.shapes == before.shapes and _names(decision.rows) == _names(before.rows)


def _names(rows: Sequence[RowView]) -> list[str]:
    return [row.sequence_id for row in rows]


def _sources(rows: Sequence[RowView]) -> list[tuple[str, str]]:
    return [(row.sequence_id, row.source) for row in rows]
