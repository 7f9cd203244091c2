"""Bars and heat maps show their values in proportion."""

from __future__ import annotations

import math

import pytest

from distillspec.report.bar_chart import Bar, bar_chart, heat_map

from .svg_elements import with_class


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
