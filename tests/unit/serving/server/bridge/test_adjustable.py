"""An operator's override of speculation lengths."""

from __future__ import annotations

from distillspec.serving.control.base import BatchView, RowView
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.smartspec import SmartSpecController
from distillspec.serving.control.wrapped import innermost, known_costs
from distillspec.serving.server.bridge.adjustable import AdjustableController, LengthOverride


def test_the_override_hides_neither_measured_costs_nor_admission() -> None:
    inside = GoodputController(4)
    assert known_costs(AdjustableController(inside)) is inside.latency is not None
    assert known_costs(AdjustableController(FixedLength(4))) is None
    smart = SmartSpecController(4, inside.latency)
    assert innermost(AdjustableController(smart)) is smart


def test_the_override_bounds_every_row() -> None:
    controller = AdjustableController(FixedLength(4))
    view = BatchView((RowView("a", 10, 4), RowView("b", 10, 1)))
    for override, expected in (
        (LengthOverride(), (4, 1)),
        (LengthOverride(max_length=3), (3, 1)),
        (LengthOverride("fixed", 2), (2, 1)),
        (LengthOverride("off", 3), (0, 0)),
    ):
        controller.override = override
        plan = controller.plan(view)
        assert tuple(row.speculation_length for row in plan.rows) == expected
        assert tuple(row.verified_length for row in plan.rows) == expected
