"""How far the log's best tokens are from whole distributions, and what α they give when that is allowed for.

The log lumps the target's rest into one number, so α = Σ min(p, q) is known up to the overlap inside it: between
`lower` (none) and `upper` (all that the masses allow). The held-out answers, scored again with whole distributions, say
which share of that room is really overlap; with it the estimate is lower + share · (upper − lower).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

Row = dict[str, Any]


def tail_shares(arms: dict[str, Any], offline: dict[str, Any], segments: int) -> list[float]:
    """By segment, over every draft that sat its exam: Σ (α − lower) / Σ (upper − lower)."""
    rows: list[list[Row]] = [[] for _ in range(segments)]
    for segment, sheet in _sheets(arms, offline):
        rows[segment] += sheet
    return [share_of_room(found) for found in rows]


def estimate(rows: Sequence[Row], shares: Sequence[float]) -> list[Row]:
    """Requests' rows with `alpha`, the estimated sum over their tokens."""
    return [row | {"alpha": row["lower"] + shares[row["segment"]] * (row["upper"] - row["lower"])} for row in rows]


def bias_by_arm(arms: dict[str, Any], shares: Sequence[float]) -> dict[str, dict[str, float]]:
    """True α of each arm's exams at its segments' ends beside bounds and estimate: is one share right for all arms?"""
    found = {}
    for name, arm in arms.items():
        rows = [row | {"segment": int(end)} for end, by_exam in arm["exams"].items() for row in by_exam[end]]
        positions = sum(row["positions"] for row in rows)
        estimated = sum(row["alpha"] for row in estimate(rows, shares)) / positions
        sums = {field: sum(row[field] for row in rows) / positions for field in ("alpha", "lower", "upper")}
        found[name] = {**sums, "estimate": estimated}
    return found


def _sheets(arms: dict[str, Any], offline: dict[str, Any]) -> Iterator[tuple[int, list[Row]]]:
    for arm in arms.values():
        for by_exam in arm["exams"].values():
            for exam, sheet in by_exam.items():
                yield int(exam), sheet
    for name, cell in offline.items():
        yield int(name.split("/")[0]), cell["exam"]


def share_of_room(rows: Sequence[Row]) -> float:
    """Σ (α − lower) / Σ (upper − lower) over rows of exams."""
    room = sum(row["upper"] - row["lower"] for row in rows)
    return sum(row["alpha"] - row["lower"] for row in rows) / room if room > 0 else 0.0
