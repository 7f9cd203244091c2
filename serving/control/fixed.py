"""The same length for every row and step."""

from __future__ import annotations

from distillspec.errors import ConfigError
from distillspec.serving.control.base import BatchView, LengthController, Plan, RowPlan


class FixedLength(LengthController):
    """Plans `length` tokens a row wherever its limit allows. 0 never speculates."""

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ConfigError(f"speculation_length={length} must be at least 0")
        self.speculation_length = length

    def plan(self, view: BatchView) -> Plan:
        return Plan(tuple([RowPlan.chain(row, self.speculation_length) for row in view.rows]))
