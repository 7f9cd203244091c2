"""The few SVG elements that the charts are made of; colours and type come from the page's CSS.

A colour is an index into the page's palette: `c0` is muted, `c1` to `c6` tell series apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TypeGuard

Number = float | int | None


def picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """A drawing that scales with its column; `title` is read out to those who cannot see it."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def empty(title: str, width: float, height: float = 120) -> str:
    """A box in place of a chart that has nothing to show."""
    return picture(title, width, height, [text("empty", width / 2, height / 2, "no values recorded")])


def text(style: str, x: float, y: float, content: str, turn: bool = False) -> str:
    """Escaped text at a place, turned upright on request."""
    rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{rotation}>{escape(content)}</text>'


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def rectangle(style: str, corner: tuple[float, float], size: tuple[float, float], tip: str, more: str = "") -> str:
    x, y = corner
    place = f'x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}"'
    return f'<rect class="{style}" {place}{more}><title>{escape(tip)}</title></rect>'


def dot(style: str, x: float, y: float, radius: float, tip: str) -> str:
    place = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle class="{style}" {place}><title>{escape(tip)}</title></circle>'


def path(element: str, style: str, places: Sequence[tuple[float, float]]) -> str:
    """A `polyline` or `polygon`."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    return f'<{element} class="{style}" points="{points}"/>'


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite int or float: charts skip everything else."""
    return isinstance(value, int | float) and math.isfinite(value)


def short(name: str, limit: int = 23) -> str:
    """At most `limit` characters, an ellipsis in place of the rest."""
    return name if len(name) <= max(limit, 4) else name[: max(limit, 4) - 1] + "…"


def margin_for(names: Sequence[str]) -> float:
    """Room for the longest of the names at the left of a chart."""
    return 16 + 6.7 * max(len(short(name)) for name in names)
