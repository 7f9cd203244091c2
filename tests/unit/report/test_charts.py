"""Charts draw what is known, skip what is not, and never produce a place that is no number."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillspec.report.axes import nice_ticks, tick_text
from distillspec.report.bar_chart import Bar, bar_chart, heat_map
from distillspec.report.line_chart import Line, Point, line_chart

LABELS = {"title": "t", "x_label": "x", "y_label": "y"}
NUMBERS = st.one_of(st.none(), st.just(math.nan), st.just(math.inf), st.floats(-1e6, 1e6))


def elements(picture: str, name: str) -> list[ET.Element]:
    return ET.fromstring(picture).findall(f".//{name}")


def with_class(picture: str, style: str) -> list[ET.Element]:
    return [item for item in ET.fromstring(picture).iter() if style in item.get("class", "").split()]


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


@pytest.mark.parametrize("lines", [[], [Line("a", [])], [Line("a", [Point(1, math.nan), Point(math.inf, 1)])]])
def test_a_chart_without_values_says_so(lines: list[Line]) -> None:
    assert "no values recorded" in line_chart(lines, **LABELS)
    assert "no values recorded" in bar_chart([("g", [Bar("b", math.nan)])], title="t")
    assert "no values recorded" in heat_map(["r"], ["c"], [[None]], title="t")


def test_bars_are_as_long_as_their_values_and_clipped_to_the_chart() -> None:
    bars = [Bar("a", 0.5, 0.4, 0.6), Bar("b", 0.25), Bar("c", 1.7, 1.5, 1.9), Bar("d", -0.1), Bar("e", math.nan)]
    picture = bar_chart([("group", bars)], title="t")
    half, quarter, over, under = (float(bar.get("width", -1)) for bar in with_class(picture, "bar"))
    assert half == pytest.approx(2 * quarter, abs=0.2)
    assert over == pytest.approx(2 * half, abs=0.2)
    assert under == 0.0
    assert [text.text for text in with_class(picture, "value")] == ["0.500", "0.250", "1.700", "-0.100"]
    assert len(with_class(picture, "whisker")) == 2


def test_heat_map_cells_grow_stronger_with_their_values() -> None:
    picture = heat_map(["a", "b"], ["x", "y"], [[0.1, 0.3], [None, 0.9]], title="t")
    shades = [float(cell.get("fill-opacity", -1)) for cell in with_class(picture, "cell")]
    assert shades == sorted(shades)
    assert len(shades) == 3
    assert [text.text for text in with_class(picture, "cell-value")] == ["0.100", "0.300", "–", "0.900"]


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


@given(st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=8), st.booleans())
def test_no_place_is_ever_not_a_number(values: list[tuple], joined: bool) -> None:
    lines = [Line("a", [Point(*value) for value in values], joined=joined)]
    picture = line_chart(lines, reference=1.0, y_from=0.0, **LABELS)
    ET.fromstring(picture)
    assert re.search(r'="[^"]*(nan|inf)', picture) is None


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_cover_the_range_with_few_round_steps(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= low + span - 1e-6 * step
    assert 2 <= len(ticks) <= 8


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.25"), (3.0, "3"), (12_000, "12k"), (0.30000000000000004, "0.3"), (0, "0")]
)
def test_tick_texts_are_short(value: float, text: str) -> None:
    assert tick_text(value) == text
