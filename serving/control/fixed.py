"""The same length for every row and step."""

from __future__ import annotations

from distillspec.errors import ConfigError
from distillspec.serving.control.base import BatchView, Plan, RowPlan, StepResult


class FixedLength:
    """Plans `length` tokens a row wherever its limit allows. 0 never speculates."""

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ConfigError(f"speculation_length={length} must be at least 0")
        self.longest = length

    def plan(self, view: BatchView) -> Plan:
        return Plan(tuple([RowPlan.chain(row, self.longest) for row in view.rows]))

    def trim(self, view: BatchView, plan: Plan) -> tuple[int, ...]:
        return tuple([row.speculation_length for row in plan.rows])

    def observe(self, result: StepResult) -> None:
        """Learn nothing."""

    def draft_changed(self) -> None:
        """Forget nothing."""
