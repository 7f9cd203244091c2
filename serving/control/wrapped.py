"""A controller around another one: it passes on everything, and those who want more of a step override that."""

from __future__ import annotations

from distillspec.serving.control.base import BatchView, LengthController, Plan, StepResult
from distillspec.serving.control.latency import LatencyModel


class WrappedController:
    """Does what the controller `inside` does."""

    def __init__(self, inside: LengthController) -> None:
        self.inside = inside

    @property
    def longest(self) -> int:
        return self.inside.longest

    def plan(self, view: BatchView) -> Plan:
        return self.inside.plan(view)

    def trim(self, view: BatchView, plan: Plan) -> tuple[int, ...]:
        return self.inside.trim(view, plan)

    def observe(self, result: StepResult) -> None:
        self.inside.observe(result)

    def draft_changed(self) -> None:
        self.inside.draft_changed()


def innermost(controller: LengthController) -> LengthController:
    """The controller that decides: what it can do besides (admission, costs that it measured) no wrapper hides."""
    while isinstance(controller, WrappedController):
        controller = controller.inside
    return controller


def known_costs(controller: LengthController) -> LatencyModel | None:
    """What the controller has measured, or was told, that steps cost; None where it does without."""
    return getattr(innermost(controller), "latency", None)
