"""Lines go through finite values and skip the others."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

from hypothesis import given
from hypothesis import strategies as st

from distillspec.report.line_chart import Line, Point, line_chart

from .svg_elements import LABELS, elements, with_class

NUMBERS = st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.floats(-1e6, 1e6))


def test_a_line_is_drawn_through_its_known_points() -> None:
    points = [Point(1, 1.0, 0.9, 1.1), Point(2, math.nan), Point(None, 5.0), Point(3, 2.0, 1.9, 2.1), Point(4, None)]
    picture = line_chart([Line("a", points)], **LABELS)
    (line,) = with_class(picture, "line")
    assert len(line.get("points", "").split()) == 2
    (band,) = with_class(picture, "band")
    assert len(band.get("points", "").split()) == 4
    assert [tip.text for tip in elements(picture, "title")] == ["a: 1 at 1", "a: 2 at 3"]


def test_higher_values_are_higher_up_and_later_ones_further_right() -> None:
    low, high = with_class(line_chart([Line("a", [Point(0, 1.0), Point(1, 2.0)])], **LABELS), "dot")
    assert float(high.get("cy", 0)) < float(low.get("cy", 0))
    assert float(high.get("cx", 0)) > float(low.get("cx", 0))


def test_an_interval_under_the_floor_does_not_lower_the_axis() -> None:
    lines = [Line("a", [Point(1, 1.0, 0.95, 1.05), Point(2, 1.5, 1.4, 1.6)])]
    ticks = [text.text for text in with_class(line_chart(lines, y_from=1.0, **LABELS), "y-tick")]
    assert ticks[0] == "1"
    lowered = [text.text for text in with_class(line_chart(lines, **LABELS), "y-tick")]
    assert float(lowered[0] or 1) < 1


def test_a_single_point_is_a_dot_with_its_whisker() -> None:
    picture = line_chart([Line("a", [Point(5, 0.5, 0.4, 0.6)], markers=False)], **LABELS)
    assert len(with_class(picture, "dot")) == len(with_class(picture, "whisker")) == 1
    assert with_class(picture, "line") == []


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=8), st.booleans())
def test_no_coordinate_is_nan(values: list[tuple], joined: bool) -> None:
    lines = [Line("a", [Point(*value) for value in values], joined=joined)]
    picture = line_chart(lines, reference=1.0, y_from=0.0, **LABELS)
    ET.fromstring(picture)
    assert re.search(r'="[^"]*(nan|inf)', picture) is None
