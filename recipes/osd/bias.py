"""Bias of α from the log's top tokens, and its correction.

The log keeps only the mass of the target's tail, so α = Σ min(p, q) is known up to the overlap within the tail: between
`lower` (none) and `upper` (as much as the masses allow). Whole distributions on held-out answers give the share of that
range that is overlap. The estimate is lower + share · (upper − lower).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]


def tail_shares(arms: dict[str, Any], offline: dict[str, Any], segments: int) -> list[float]:
    """Return Σ (α − lower) / Σ (upper − lower) by segment, over all drafts evaluated on it."""
    rows: list[list[Row]] = [[] for _ in range(segments)]
    for segment, segment_rows in _evaluations(arms, offline):
        rows[segment] += segment_rows
    return [share_of_room(segment_rows) for segment_rows in rows]


def estimate(rows: Sequence[Row], shares: Sequence[float]) -> list[Row]:
    """Add `alpha`, the estimated sum over their tokens, to requests' rows."""
    return [row | {"alpha": row["lower"] + shares[row["segment"]] * (row["upper"] - row["lower"])} for row in rows]


def bias_by_arm(arms: dict[str, Any], shares: Sequence[float]) -> dict[str, dict[str, float]]:
    """Compare true α, bounds and estimate of each arm at its segments' ends: does one share suit all arms?"""
    biases = {}
    for name, arm in arms.items():
        rows = [row | {"segment": int(end)} for end, by_segment in arm["exams"].items() for row in by_segment[end]]
        positions = sum(row["positions"] for row in rows)
        estimated = sum(row["alpha"] for row in estimate(rows, shares)) / positions
        sums = {field: sum(row[field] for row in rows) / positions for field in ("alpha", "lower", "upper")}
        biases[name] = {**sums, "estimate": estimated}
    return biases


def _evaluations(arms: dict[str, Any], offline: dict[str, Any]) -> Iterator[tuple[int, list[Row]]]:
    for arm in arms.values():
        for by_segment in arm["exams"].values():
            for segment, rows in by_segment.items():
                yield int(segment), rows
    for name, cell in offline.items():
        yield int(name.split("/")[0]), cell["exam"]


def share_of_room(rows: Sequence[Row]) -> float:
    """Return Σ (α − lower) / Σ (upper − lower) over rows of evaluated answers."""
    room = sum(row["upper"] - row["lower"] for row in rows)
    return sum(row["alpha"] - row["lower"] for row in rows) / room if room > 0 else 0.0
