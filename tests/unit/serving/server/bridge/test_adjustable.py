"""An operator's override of speculation lengths."""

from __future__ import annotations

from distillspec.serving.base.controllers import PlansTrees
from distillspec.serving.base.fixed import FixedLength, FixedTree
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.wrapped import innermost
from distillspec.serving.baselines.smartspec import SmartSpecController
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.known import known_costs
from distillspec.serving.selection.baselines import Fixed
from distillspec.serving.selection.selecting import SelectingController
from distillspec.serving.server.bridge.adjustable import AdjustableController, LengthOverride

from ...selection.steps import parts, row


def test_the_override_hides_neither_measured_costs_nor_admission() -> None:
    inside = GoodputController(4)
    assert known_costs(AdjustableController(inside)) is inside.latency is not None
    assert known_costs(AdjustableController(FixedLength(4))) is None
    smart = SmartSpecController(4, inside.latency)
    assert innermost(AdjustableController(smart)) is smart


def test_a_fixed_length_leaves_each_row_its_own_draft() -> None:
    names = ("a", "b")
    selecting = SelectingController(GoodputController(4), lambda latency: Fixed(parts(names), draft="b"))
    controller = AdjustableController(selecting)
    controller.override = LengthOverride("fixed", 2)
    plan = controller.plan(BatchView((row("1/0", names),)))
    assert plan.chosen == {"1/0": "b"}
    assert [[(tree.source, tree.shape.depth) for tree in own.trees] for own in plan.rows] == [[("b", 2)]]


def test_the_override_bounds_every_row() -> None:
    controller = AdjustableController(FixedLength(4))
    view = BatchView((RowView("a", 10, 4), RowView("b", 10, 1)))
    for override, expected in (
        (LengthOverride(), (4, 1)),
        (LengthOverride(speculation_length=3), (3, 1)),
        (LengthOverride("fixed", 2), (2, 1)),
        (LengthOverride("off", 3), (0, 0)),
    ):
        controller.override = override
        plan = controller.plan(view)
        assert tuple(row.speculation_length for row in plan.rows) == expected
        assert tuple(row.verified_length for row in plan.rows) == expected


def test_wide_trees_are_reserved_and_other_sources_are_bounded_too() -> None:
    controller = AdjustableController(FixedTree(TreeShape.full((3, 2))))
    assert isinstance(controller, PlansTrees)
    assert controller.most_nodes == 9
    assert AdjustableController(FixedLength(4)).most_nodes == 4
    controller = AdjustableController(GoodputController(4))
    row = RowView("a", 10, 4, drafted_by_model=False, match=8, source="lookup", others=(Option(4),))
    controller.override = LengthOverride(policy="off")
    assert [planned.trees for planned in controller.plan(BatchView((row,))).rows] == [()]
    controller.override = LengthOverride(speculation_length=1)
    assert all(planned.speculation_length <= 1 for planned in controller.plan(BatchView((row,))).rows)
