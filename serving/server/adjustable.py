"""The length controller with a hand on it: a bound and a policy that operators may change while it runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from distillspec.serving.control.base import BatchView, LengthController, Plan
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.wrapped import WrappedController

Policy = Literal["engine", "fixed", "off"]


@dataclass(frozen=True)
class Hand:
    """What an operator wants: the engine's own controller, one length for all, or no speculation; and a bound."""

    policy: Policy = "engine"
    max_length: int | None = None


class AdjustableController(WrappedController):
    """Plans as the controller inside does, within the operator's bound, or with one fixed length instead.

    The controller inside sees the bound as every row's limit and goes on observing under any policy, so that going
    back to it finds it informed. `hand` may be replaced from any thread; a step sees one value of it.
    """

    def __init__(self, inside: LengthController) -> None:
        super().__init__(inside)
        self.hand = Hand()

    def plan(self, view: BatchView) -> Plan:
        hand = self.hand
        bound = self._bound(hand)
        if bound < self.longest:
            view = replace(view, rows=tuple(row._replace(limit=min(row.limit, bound)) for row in view.rows))
        return FixedLength(bound).plan(view) if hand.policy == "fixed" else super().plan(view)

    def _bound(self, hand: Hand) -> int:
        if hand.policy == "off":
            return 0
        return self.longest if hand.max_length is None else min(self.longest, hand.max_length)
