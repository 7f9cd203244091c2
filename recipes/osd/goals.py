"""The issue's goals, and how far each arm is from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from distillspec.evaluation.bootstrap import interval, relative_gain
from distillspec.types import Interval

SAMPLES = 1000
GAIN, SHARE = 0.10, 0.95  # absolute over static after a shift; of the rival's or the earlier α

Row = dict[str, Any]


def goals(arms: dict[str, Any], offline: dict[str, Any], segments: int, seed: int) -> dict[str, Any]:
    """By arm: `gain` over static in the second half of each segment after a shift, `of_offline`, the share of what a
    draft distilled on 100 % of the segment reaches, `kept`, the share of its first α that the first exam has when the
    first domain returns, and `returned`, α over the last segment as a share of that over the first.

    Rows of arms have `alpha` (`bias.estimate`); exams hold true α.
    """
    last, found = segments - 1, {}
    static = arms["static"]["requests"]
    for name, arm in arms.items():
        if name == "static":
            continue
        exams, rows = arm["exams"], arm["requests"]
        found[name] = {
            "gain": {s: asdict(gain(half(rows, s, 1), half(static, s, 1), seed)) for s in range(1, segments)},
            "of_offline": {
                s: asdict(ratio(offline[f"{s}/1"]["exam"], exams[str(s)][str(s)], seed))
                for s in range(segments)
                if f"{s}/1" in offline
            },
            "kept": asdict(ratio(exams["0"]["0"], exams[str(max(0, last - 1))]["0"], seed)),
            "returned": alpha(of(rows, last)) / alpha(of(rows, 0)),
        }
    return found


def gain(rows: Sequence[Row], static: Sequence[Row], seed: int) -> Interval:
    """Σ of differences by request / tokens: what makes a request easy for both cancels."""
    differences = [row["alpha"] - other["alpha"] for row, other in zip(rows, static, strict=True)]
    return interval(differences, [row["tokens"] for row in rows], SAMPLES, seed)


def ratio(before: Sequence[Row], after: Sequence[Row], seed: int) -> Interval:
    """α of one exam sheet as a share of another's, on the same answers."""
    first, second = (([r["alpha"] for r in sheet], [r["positions"] for r in sheet]) for sheet in (before, after))
    found = relative_gain(first, second, SAMPLES, seed)
    return Interval(1 + found.mean, 1 + found.low, 1 + found.high)


def of(rows: Sequence[Row], segment: int) -> list[Row]:
    """A segment's requests."""
    return [row for row in rows if row["segment"] == segment]


def half(rows: Sequence[Row], segment: int, which: int) -> list[Row]:
    """The first (0) or second (1) half of a segment's requests."""
    own = of(rows, segment)
    middle = len(own) // 2
    return own[middle:] if which else own[:middle]


def alpha(rows: Sequence[Row]) -> float:
    """α over all tokens of some requests."""
    return sum(row["alpha"] for row in rows) / sum(row["tokens"] for row in rows)
