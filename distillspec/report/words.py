"""Figures as text and HTML. Strings from outside are escaped here or where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from distillspec.report.svg import Number, is_number

DASH = "–"


def figure(value: Number, digits: int = 3, unit: str = "") -> str:
    """Return a number with `digits` decimals, or a dash if it is None or not finite."""
    if not is_number(value):
        return DASH
    return f"{value:,.{digits}f}{unit}"


def mean_of(interval: Any) -> Number:
    """Return the mean of an Interval's JSON, None if it is missing."""
    return interval.get("mean") if isinstance(interval, dict) else None


def span(interval: Any, digits: int = 3, unit: str = "") -> str:
    """Return an Interval's bounds as 0.462–0.486, or an empty string if they are missing."""
    if not isinstance(interval, dict) or any(not is_number(interval.get(key)) for key in ("low", "high")):
        return ""
    return f"{interval['low']:,.{digits}f}–{interval['high']:,.{digits}f}{unit}"


def with_span(interval: Any, digits: int = 3) -> str:
    """Return a table cell: the mean, and beside it the interval in small type."""
    bounds = span(interval, digits)
    return figure(mean_of(interval), digits) + (f' <span class="span">{bounds}</span>' if bounds else "")


def policy_text(policy: Any) -> str:
    """Return `temperature 1, top-p 0.95`, without filters that are off."""
    if not isinstance(policy, dict):
        return "an unrecorded policy"
    temperature = policy.get("temperature", 1.0)
    parts = ["greedy" if temperature == 0 else f"temperature {temperature:g}"]
    off = {"top_k": 0, "top_p": 1, "min_p": 0}
    parts += [f"{key.replace('_', '-')} {policy[key]:g}" for key in off if policy.get(key, off[key]) != off[key]]
    return ", ".join(parts)


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 1) -> str:
    """Return a table of cells that are HTML already. The first `texts` columns are words, the others numbers."""
    classes = ["" if i < texts else ' class="n"' for i in range(len(head))]
    top = "".join(f'<th{c} scope="col">{cell}</th>' for c, cell in zip(classes, head, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{c}>{cell}</td>" for c, cell in zip(classes, row, strict=True)) + "</tr>" for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def chart(heading: str, picture: str, legend: Sequence[tuple[str, int]] = (), note: str = "") -> str:
    """Return a figure with heading, legend (name, colour index) and note. Texts are escaped here."""
    keys = "".join(f'<span><i class="c{color}"></i>{escape(name)}</span>' for name, color in legend)
    key = f'<div class="legend">{keys}</div>' if len(legend) > 1 else ""
    below = f"<p>{escape(note)}</p>" if note else ""
    return f"<figure><figcaption>{escape(heading)}</figcaption>{key}{picture}{below}</figure>"
