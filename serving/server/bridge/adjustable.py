"""Length controller whose policy and bound operators may change while the engine runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.plans import Plan
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.wrapped import WrappedController

Policy = Literal["engine", "fixed", "off"]


@dataclass(frozen=True)
class LengthOverride:
    """An operator's choice: the engine's own controller, one fixed length, or no speculation, and a bound.

    Args:
        speculation_length: the bound, and the length where it is fixed. None: the engine's own.
    """

    policy: Policy = "engine"
    speculation_length: int | None = None


class AdjustableController(WrappedController):
    """Controller that plans with the inner one within an operator's bound, or with one fixed length.

    The inner controller sees the bound as each row's limit. It observes every step under any policy, so it is up to
    date when the operator goes back to it. `override` may be replaced from any thread. A step reads it once.
    """

    def __init__(self, inside: LengthController) -> None:
        super().__init__(inside)
        self.override = LengthOverride()

    def plan(self, view: BatchView) -> Plan:
        override = self.override
        bound = self._bound(override)
        if bound < self.speculation_length:
            view = replace(view, rows=tuple([row.within(bound) for row in view.rows]))
        return self.plan_by(view, FixedLength(bound)) if override.policy == "fixed" else super().plan(view)

    def _bound(self, override: LengthOverride) -> int:
        if override.policy == "off":
            return 0
        given = override.speculation_length
        return self.speculation_length if given is None else min(self.speculation_length, given)
