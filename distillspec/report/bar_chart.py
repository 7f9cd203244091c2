"""Bar charts with whiskers, and heat maps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.report import svg
from distillspec.report.svg import Number, is_number

BAR_HEIGHT, GROUP_GAP = 20, 16
ROW_HEIGHT, HEAD = 28, 22


@dataclass(frozen=True)
class Bar:
    """One bar of a group. It is left out unless its value is finite."""

    label: str
    value: Number
    low: Number = None
    high: Number = None
    color: int = 1


def bar_chart(groups: Sequence[tuple[str, Sequence[Bar]]], *, title: str, width: int = 480, limit: float = 1.0) -> str:
    """Return an SVG of horizontal bars from 0 to `limit` in named groups, each with whisker and value."""
    known = [(name, [bar for bar in bars if is_number(bar.value)]) for name, bars in groups]
    known = [(name, bars) for name, bars in known if bars]
    if not known:
        return svg.empty(title, width)
    left, y, parts = svg.margin_for([name for name, _ in known]), 6.0, []
    scale = (width - left - 48) / limit
    for name, bars in known:
        parts.append(svg.text("name", left - 8, y + BAR_HEIGHT * len(bars) / 2, svg.short(name)))
        for bar in bars:
            parts += _bar(bar, left, y, scale, limit)
            y += BAR_HEIGHT
        y += GROUP_GAP
    bottom = y - GROUP_GAP + 6
    return svg.picture(title, width, bottom, [svg.line("axis", left, 0, left, bottom), *parts])


def heat_map(
    rows: Sequence[str],
    columns: Sequence[str],
    values: Sequence[Sequence[Number]],
    *,
    title: str,
    width: int = 480,
) -> str:
    """Return an SVG of shaded cells with their numbers. The highest value has the strongest shade."""
    known = [value for row in values for value in row if is_number(value)]
    if not known:
        return svg.empty(title, width)
    low, span = min(known), (max(known) - min(known)) or 1.0
    left = svg.margin_for(rows)
    cell = (width - left) / len(columns)
    parts = _column_names(columns, left, cell)
    for r, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = HEAD + r * ROW_HEIGHT
        parts.append(svg.text("name", left - 8, y + ROW_HEIGHT / 2, svg.short(name)))
        for i, value in enumerate(row):
            tip = f"{name}, {columns[i]}"
            share = (value - low) / span if is_number(value) else None
            parts += _cell(value, share, (left + i * cell, y), cell, tip)
    return svg.picture(title, width, HEAD + len(rows) * ROW_HEIGHT + 2, parts)


def _column_names(columns: Sequence[str], left: float, cell: float) -> list[str]:
    limit = int(cell / 6.7)
    return [svg.text("column", left + (i + 0.5) * cell, 14, svg.short(name, limit)) for i, name in enumerate(columns)]


def _bar(bar: Bar, left: float, y: float, scale: float, limit: float) -> list[str]:
    if not is_number(bar.value):
        return []
    length, middle = min(max(bar.value, 0.0), limit) * scale, y + BAR_HEIGHT / 2
    tip = f"{bar.label}: {bar.value:.3f}"
    parts = [svg.rectangle(f"bar c{bar.color}", (left, y + 2), (length, BAR_HEIGHT - 4), tip)]
    end = left + length
    if is_number(bar.low) and is_number(bar.high):
        high = left + min(bar.high, limit) * scale
        parts.append(svg.line("whisker ink", left + max(bar.low, 0.0) * scale, middle, high, middle))
        end = max(end, high)
    return [*parts, svg.text("value", end + 6, middle, f"{bar.value:.3f}")]


def _cell(value: Number, share: Number, corner: tuple[float, float], width: float, tip: str) -> list[str]:
    x, y = corner
    middle = x + width / 2, y + ROW_HEIGHT / 2
    if not is_number(value) or not is_number(share):
        return [svg.text("cell-value", *middle, "–")]
    shade = f' fill-opacity="{0.08 + 0.87 * share:.3f}"'
    style = "cell-value strong" if share > 0.55 else "cell-value"
    box = svg.rectangle("cell", (x + 1, y + 1), (width - 2, ROW_HEIGHT - 2), f"{tip}: {value:.3f}", shade)
    return [box, svg.text(style, *middle, f"{value:.3f}")]
