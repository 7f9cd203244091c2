"""Line charts: lines with bands, and separate points with whiskers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from distillspec.report import svg
from distillspec.report.axes import LEFT, Frame, nice_ticks
from distillspec.report.svg import Number, is_number


@dataclass(frozen=True)
class Point:
    """One value with an optional interval. None, NaN and infinite values are skipped."""

    x: Number
    y: Number
    low: Number = None
    high: Number = None

    @property
    def is_known(self) -> bool:
        return is_number(self.x) and is_number(self.y)


@dataclass(frozen=True)
class Line:
    """A named series. A line of one point is drawn as that point with its whisker."""

    label: str
    points: Sequence[Point]
    color: int = 1
    markers: bool = True
    joined: bool = True  # False: hollow separate points with whiskers
    faint: bool = False


def line_chart(
    lines: Sequence[Line],
    *,
    title: str,
    x_label: str,
    y_label: str,
    x_ticks: Sequence[float] | None = None,
    x_range: tuple[float, float] | None = None,
    y_from: float | None = None,
    reference: float | None = None,
    width: int = 480,
    height: int = 270,
) -> str:
    """Return an SVG, or a box with a message if no value is finite.

    Args:
        x_ticks: positions of a discrete x axis.
        x_range: range of a continuous x axis, by default that of the data.
        y_from: start of the y axis. Values below it, such as intervals beyond a natural bound, are drawn on it.
        reference: y of a dashed horizontal line.
    """
    lines = [line if y_from is None else _raised(line, y_from) for line in lines]
    known = [point for line in lines for point in line.points if point.is_known]
    if not known:
        return svg.empty(title, width, height)
    xs, x_ticks = _x_axis(known, x_ticks, x_range)
    y_ticks = _y_ticks(known, y_from, reference)
    frame = Frame(xs, (y_ticks[0], y_ticks[-1]), x_ticks, y_ticks, width, height)
    parts = frame.draw(x_label, y_label)
    if reference is not None:
        y = frame.place(xs[0], reference)[1]
        parts.append(svg.line("reference", LEFT, y, frame.right, y))
    for draw in (_band, _path, _dots):  # all bands first, so that none covers a line
        parts += [part for line in lines for part in draw(frame, line)]
    return svg.picture(title, width, height, parts)


def _raised(line: Line, floor: float) -> Line:
    raised = []
    for point in line.points:
        ys = [max(value, floor) if is_number(value) else value for value in (point.y, point.low, point.high)]
        raised.append(Point(point.x, *ys))
    return replace(line, points=raised)


def _x_axis(
    points: Sequence[Point], ticks: Sequence[float] | None, span: tuple[float, float] | None
) -> tuple[tuple[float, float], tuple[float, ...]]:
    if ticks is not None:  # some room on either side of the outer positions
        return (min(ticks) - 0.3, max(ticks) + 0.3), tuple(ticks)
    xs = [point.x for point in points if is_number(point.x)]
    low, high = span or (min(xs), max(xs))
    low, high = (low, high) if high > low else (low - 0.5, low + 0.5)
    return (low, high), tuple(tick for tick in nice_ticks(low, high) if low <= tick <= high)


def _y_ticks(points: Sequence[Point], y_from: Number, reference: Number) -> tuple[float, ...]:
    values = [v for p in points for v in (p.y, p.low, p.high, y_from, reference) if is_number(v)]
    return nice_ticks(min(values), max(values))


def _band(frame: Frame, line: Line) -> list[str]:
    upper, lower = [], []
    for point in line.points:
        if is_number(point.x) and is_number(point.low) and is_number(point.high):
            upper.append(frame.place(point.x, point.high))
            lower.append(frame.place(point.x, point.low))
    if not line.joined or len(upper) < 2:
        return []
    return [svg.path("polygon", f"band c{line.color}", upper + lower[::-1])]


def _path(frame: Frame, line: Line) -> list[str]:
    pixels = [frame.place(p.x, p.y) for p in line.points if is_number(p.x) and is_number(p.y)]
    if not line.joined or len(pixels) < 2:
        return []
    return [svg.path("polyline", f"line c{line.color}{' faint' if line.faint else ''}", pixels)]


def _dots(frame: Frame, line: Line) -> list[str]:
    points = [point for point in line.points if point.is_known]
    if not line.markers and len(points) > 1:
        return []
    alone, parts = not line.joined or len(points) == 1, []
    for point in points:
        if is_number(point.x) and is_number(point.y):
            if alone and is_number(point.low) and is_number(point.high):
                ends = frame.place(point.x, point.low), frame.place(point.x, point.high)
                parts.append(svg.line(f"whisker c{line.color}", *ends[0], *ends[1]))
            style, radius = ("dot", 2.6) if line.joined else ("dot hollow", 4)
            tip = f"{line.label}: {point.y:.4g} at {point.x:.4g}"
            parts.append(svg.dot(f"{style} c{line.color}", *frame.place(point.x, point.y), radius, tip))
    return parts
