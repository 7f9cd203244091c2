"""Axes: round ticks, and the map from data to page coordinates."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distillspec.report import svg

LEFT, RIGHT, TOP, BOTTOM = 50, 14, 12, 44  # margins in user units


@dataclass(frozen=True)
class Frame:
    """Data ranges with their ticks, and the box they are drawn in. y grows upwards in data, downwards on the page."""

    x: tuple[float, float]
    y: tuple[float, float]
    x_ticks: tuple[float, ...]
    y_ticks: tuple[float, ...]
    width: float
    height: float

    @property
    def right(self) -> float:
        return self.width - RIGHT

    @property
    def base(self) -> float:
        return self.height - BOTTOM

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return the page coordinates of a data point."""
        across = (x - self.x[0]) / (self.x[1] - self.x[0])
        up = (y - self.y[0]) / (self.y[1] - self.y[0])
        return LEFT + across * (self.right - LEFT), self.base - up * (self.base - TOP)

    def draw(self, x_label: str, y_label: str) -> list[str]:
        """Return grid lines, ticks, the x axis and both labels as SVG elements."""
        parts = []
        for tick in self.y_ticks:
            y = self.place(self.x[0], tick)[1]
            parts += [
                svg.line("grid", LEFT, y, self.right, y),
                svg.text("y-tick", LEFT - 8, y, tick_text(tick)),
            ]
        for tick in self.x_ticks:
            parts.append(svg.text("x-tick", self.place(tick, self.y[0])[0], self.base + 17, tick_text(tick)))
        parts.append(svg.line("axis", LEFT, self.base, self.right, self.base))
        parts.append(svg.text("label", (LEFT + self.right) / 2, self.height - 6, x_label))
        parts.append(svg.text("label", 11, (TOP + self.base) / 2, y_label, turn=True))
        return parts


def nice_ticks(low: float, high: float, count: int = 5) -> tuple[float, ...]:
    """Return round numbers, 1, 2 or 5 times a power of ten apart, that cover `low` to `high`."""
    if high <= low:
        pad = abs(low) * 0.1 or 0.5
        low, high = low - pad, high + pad
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return tuple(round(i * step, 12) for i in range(first, last + 1))


def tick_text(value: float) -> str:
    """Return a short number without trailing zeros: 0.25, 3, 12k."""
    return f"{value / 1000:g}k" if abs(value) >= 10_000 else f"{value:.6g}"
