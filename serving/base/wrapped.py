"""Wrapper of a length controller. Subclasses override the methods that they change."""

from __future__ import annotations

from distillspec.serving.base.controllers import LengthController, PlansTrees
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView


class WrappedController:
    """Passes every call to the controller `inside`."""

    def __init__(self, inside: LengthController) -> None:
        self.inside, self.speculation_length = inside, inside.speculation_length

    @property
    def most_nodes(self) -> int:
        """The most tokens that the inner controller may plan for a row."""
        return self.inside.most_nodes if isinstance(self.inside, PlansTrees) else self.speculation_length

    def plan(self, view: BatchView) -> Plan:
        return self.inside.plan(view)

    def plan_by(self, view: BatchView, lengths: LengthController) -> Plan:
        """Plan one step with other lengths than those of the controller inside all wrappers."""
        return self.inside.plan_by(view, lengths) if isinstance(self.inside, WrappedController) else lengths.plan(view)

    def observe(self, result: StepResult) -> None:
        self.inside.observe(result)

    def draft_changed(self, change: DraftChange) -> None:
        self.inside.draft_changed(change)


def innermost(controller: LengthController) -> LengthController:
    """Return the controller inside all wrappers, with its further abilities (admission, measured costs)."""
    while isinstance(controller, WrappedController):
        controller = controller.inside
    return controller
