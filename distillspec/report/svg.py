"""SVG elements of the charts. Colours and fonts come from the page's CSS.

A colour is an index into the page's palette: `c0` is muted, `c1` to `c6` are for series.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import TypeGuard

Number = float | int | None


def picture(title: str, width: float, height: float, parts: Sequence[str]) -> str:
    """Return a drawing that scales with its column. Screen readers read its `title`."""
    box = f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="{escape(title)}"'
    return f"<svg {box}>{''.join(parts)}</svg>"


def empty(title: str, width: float, height: float = 120) -> str:
    """Return a box in place of a chart without values."""
    return picture(title, width, height, [text("empty", width / 2, height / 2, "no values recorded")])


def text(style: str, x: float, y: float, content: str, turn: bool = False) -> str:
    """Return escaped text at (x, y). `turn` rotates it upwards."""
    rotation = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turn else ""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}"{rotation}>{escape(content)}</text>'


def line(style: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{style}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def rectangle(style: str, corner: tuple[float, float], size: tuple[float, float], tip: str, more: str = "") -> str:
    x, y = corner
    geometry = f'x="{x:.1f}" y="{y:.1f}" width="{size[0]:.1f}" height="{size[1]:.1f}"'
    return f'<rect class="{style}" {geometry}{more}><title>{escape(tip)}</title></rect>'


def dot(style: str, x: float, y: float, radius: float, tip: str) -> str:
    geometry = f'cx="{x:.1f}" cy="{y:.1f}" r="{radius}"'
    return f'<circle class="{style}" {geometry}><title>{escape(tip)}</title></circle>'


def path(element: str, style: str, corners: Sequence[tuple[float, float]]) -> str:
    """Return a `polyline` or `polygon`."""
    points = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
    return f'<{element} class="{style}" points="{points}"/>'


def is_number(value: object) -> TypeGuard[float]:
    """True for a finite int or float. Charts skip everything else."""
    return isinstance(value, int | float) and math.isfinite(value)


def short(name: str, limit: int = 23) -> str:
    """Return at most `limit` characters of a name, with an ellipsis for the rest."""
    return name if len(name) <= max(limit, 4) else name[: max(limit, 4) - 1] + "…"


def margin_for(names: Sequence[str]) -> float:
    """Return the left margin for the longest of the names."""
    return 16 + 6.7 * max(len(short(name)) for name in names)
