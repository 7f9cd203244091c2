"""The length controller with a hand on it: a bound and a policy that operators may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from distillspec.serving.control.base import (
    AdmissionController,
    AdmissionView,
    BatchView,
    LengthController,
    Plan,
    StepResult,
)
from distillspec.serving.control.fixed import FixedLength

Policy = Literal["engine", "fixed", "off"]


@dataclass(frozen=True)
class Hand:
    """What an operator wants: the engine's own controller, one length for all, or no speculation; and a bound."""

    policy: Policy = "engine"
    max_length: int | None = None


class AdjustableController:
    """Plans as the controller inside does, within the operator's bound, or with one fixed length instead.

    The controller inside sees the bound as every row's limit and goes on observing under any policy, so that going
    back to it finds it informed. `hand` may be replaced from any thread; a step sees one value of it.
    """

    def __init__(self, inside: LengthController) -> None:
        self.inside = inside
        self.hand = Hand()

    @property
    def longest(self) -> int:
        return self.inside.longest

    @property
    def latency(self) -> Any:
        """The costs of steps as the controller inside knows them; None where it knows none."""
        return getattr(self.inside, "latency", None)

    def plan(self, view: BatchView) -> Plan:
        hand = self.hand
        bound = self._bound(hand)
        if bound < self.longest:
            view = replace(view, rows=tuple(row._replace(limit=min(row.limit, bound)) for row in view.rows))
        return (FixedLength(bound) if hand.policy == "fixed" else self.inside).plan(view)

    def trim(self, view: BatchView, plan: Plan) -> tuple[int, ...]:
        """What the plan says already holds the bound; the controller inside may only cut further."""
        return self.inside.trim(view, plan)

    def observe(self, result: StepResult) -> None:
        self.inside.observe(result)

    def draft_changed(self) -> None:
        self.inside.draft_changed()

    def _bound(self, hand: Hand) -> int:
        if hand.policy == "off":
            return 0
        return self.longest if hand.max_length is None else min(self.longest, hand.max_length)


class AdmittingController(AdjustableController):
    """The same over a controller that also says who is let in; the hand leaves that to it."""

    def admit(self, view: AdmissionView) -> int:
        assert isinstance(self.inside, AdmissionController)
        return self.inside.admit(view)


def adjustable(inside: LengthController) -> AdjustableController:
    """A hand on a controller that takes nothing from it."""
    return AdmittingController(inside) if isinstance(inside, AdmissionController) else AdjustableController(inside)
