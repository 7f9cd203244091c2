"""Figures of a run as text; every string that comes from outside is escaped here or where it is used."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Any

from distillspec.report.svg import Number

DASH = "–"


def figure(value: Number, digits: int = 3, unit: str = "") -> str:
    """A number to `digits` decimals, or a dash where there is none."""
    if value is None or not math.isfinite(value):
        return DASH
    return f"{value:,.{digits}f}{unit}"


def mean_of(interval: Any) -> Number:
    """The mean of an Interval's JSON, None where it is missing."""
    return interval.get("mean") if isinstance(interval, dict) else None


def span(interval: Any, digits: int = 3, unit: str = "") -> str:
    """An Interval's bounds: 0.462–0.486; empty where they are missing."""
    if not isinstance(interval, dict) or any(not _known(interval.get(key)) for key in ("low", "high")):
        return ""
    return f"{interval['low']:,.{digits}f}–{interval['high']:,.{digits}f}{unit}"


def with_span(interval: Any, digits: int = 3) -> str:
    """Table cell: the mean with its interval, smaller, beside it."""
    bounds = span(interval, digits)
    return figure(mean_of(interval), digits) + (f' <span class="span">{bounds}</span>' if bounds else "")


def policy_text(policy: Any) -> str:
    """`temperature 1, top-p 0.95`, leaving out what is switched off."""
    if not isinstance(policy, dict):
        return "an unrecorded policy"
    temperature = policy.get("temperature", 1.0)
    parts = ["greedy" if temperature == 0 else f"temperature {temperature:g}"]
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    parts += [f"{key.replace('_', '-')} {policy[key]:g}" for key in off if policy.get(key, off[key]) != off[key]]
    return ", ".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> str:
    """An HTML table from cells that are HTML already; the first `texts` columns are words, others numbers."""
    classes = ["" if i < texts else ' class="n"' for i in range(len(head))]
    top = "".join(f'<th{c} scope="col">{cell}</th>' for c, cell in zip(classes, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def chart(heading: str, picture: str, legend: Sequence[tuple[str, int]] = (), note: str = "") -> str:
    """A figure with heading, legend (name, colour index) and note; all texts are escaped here."""
    keys = "".join(f'<span><i class="c{color}"></i>{escape(name)}</span>' for name, color in legend)
    key = f'<div class="legend">{keys}</div>' if len(legend) > 1 else ""
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(heading)}</figcaption>{key}{picture}{below}</figure>"


def _known(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)
