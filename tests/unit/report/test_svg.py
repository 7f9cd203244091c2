"""All charts: no values, equal values, hostile texts."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from distillspec.report.bar_chart import Bar, bar_chart, heat_map
from distillspec.report.line_chart import Line, Point, line_chart

from .svg_elements import LABELS, with_class


@pytest.mark.parametrize("lines", [[], [Line("a", [])], [Line("a", [Point(1, math.nan), Point(math.inf, 1)])]])
def test_a_chart_without_values_says_so(lines: list[Line]) -> None:
    assert "no values recorded" in line_chart(lines, **LABELS)
    assert "no values recorded" in bar_chart([("g", [Bar("b", math.nan)])], title="t")
    assert "no values recorded" in heat_map(["r"], ["c"], [[None]], title="t")


def test_equal_values_do_not_divide_by_zero() -> None:
    assert len(with_class(heat_map(["a"], ["x", "y"], [[0.5, 0.5]], title="t"), "cell")) == 2
    assert len(with_class(line_chart([Line("a", [Point(1, 2), Point(2, 2)])], **LABELS), "dot")) == 2


def test_texts_are_escaped() -> None:
    evil = "<script>&\"'"
    for picture in (
        line_chart([Line(evil, [Point(1, 1)])], title=evil, x_label=evil, y_label=evil),
        bar_chart([(evil, [Bar(evil, 0.5)])], title=evil),
        heat_map([evil], [evil], [[0.5]], title=evil),
    ):
        assert "<script" not in picture
        assert ET.fromstring(picture).get("aria-label") == evil
