"""The same shape for every row and step."""

from __future__ import annotations

from distillspec.errors import ConfigError
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import Plan, RowPlan
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.shape import TreeShape, chain_shape


class FixedLength(LengthController):
    """Plans `length` tokens a row wherever its limit allows. 0 never speculates."""

    def __init__(self, length: int) -> None:
        if length < 0:
            raise ConfigError(f"speculation_length={length} must be at least 0")
        self.speculation_length = length

    def plan(self, view: BatchView) -> Plan:
        return Plan(tuple([RowPlan.chain(row, self.speculation_length) for row in view.rows]))


class FixedTree(LengthController):
    """Plans one shape for every row, cut to the levels that the row may have.

    Args:
        sources: how many sources may draft for a row. With several, each that has something drafts the shape, and their
            trees are joined (SpecInfer, Miao et al. 2024).
    """

    def __init__(self, shape: TreeShape, sources: int = 1) -> None:
        self.shape, self.joins = shape, sources > 1
        self.speculation_length, self.most_nodes = shape.depth, shape.nodes * sources

    def plan(self, view: BatchView) -> Plan:
        if not self.joins:
            return alike(view, self.shape)
        return Plan(tuple([RowPlan.joined(row, self.shape) for row in view.rows]))


def joined(controller: LengthController, sources: int) -> FixedTree:
    """Return the controller that plans a fixed shape for each of several sources, in one tree.

    Raises:
        ConfigError: the controller has no fixed shape.
    """
    if isinstance(controller, FixedTree):
        return FixedTree(controller.shape, sources)
    if isinstance(controller, FixedLength):
        return FixedTree(chain_shape(controller.speculation_length), sources)
    raise ConfigError("several drafts in one tree need a fixed shape, as of fixed-3 or tree-2-2")


def alike(view: BatchView, shape: TreeShape, tokens: float | None = None, seconds: float | None = None) -> Plan:
    """Return the plan of one shape for all rows, cut to the levels that each row may have."""
    return Plan(tuple([RowPlan.of(row, shape) for row in view.rows]), tokens, seconds)
