"""Goals of the study, and each arm's distance from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from distillspec.evaluation.bootstrap import interval, relative_gain
from distillspec.types import Interval

SAMPLES = 1000
# Gain over static in the second half of a segment after a shift, its share of what a draft distilled on the whole
# segment gains, and gain at the return to the first domain.
GAIN, SHARE, RETURN = 0.08, 0.80, -0.01

Row = dict[str, Any]


def goals(arms: dict[str, Any], offline: dict[str, Any], segments: int, seed: int) -> dict[str, Any]:
    """Return the goals' figures by arm.

    gain: α over static's, in the second half of each segment after the first. The last is the return.
    rival_gain: α over static's of a draft distilled on 100 % of the segment, on its held-out answers.
    of_rival: `gain` as a share of `rival_gain`, None where the rival gains nothing.
    of_offline: α as a share of that draft's.
    kept: share of the first α on the first segment's held-out answers, when the first domain returns.
    returned: α over the last segment as a share of that over the first.

    Rows of arms have `alpha` from `bias.estimate`, rows of held-out answers the true one.
    """
    last = segments - 1
    by_arm = {}
    static, without = arms["static"]["requests"], arms["static"]["exams"]
    rivals = {
        segment: gain(offline[f"{segment}/1"]["exam"], without[str(segment)][str(segment)], seed, "positions")
        for segment in range(1, segments)
        if f"{segment}/1" in offline
    }
    for name, arm in arms.items():
        if name == "static":
            continue
        held_out, rows = arm["exams"], arm["requests"]
        gains = {
            segment: gain(half(rows, segment, 1), half(static, segment, 1), seed) for segment in range(1, segments)
        }
        by_arm[name] = {
            "gain": {segment: asdict(difference) for segment, difference in gains.items()},
            "rival_gain": {segment: asdict(rival) for segment, rival in rivals.items()},
            "of_rival": {
                segment: gains[segment].mean / rival.mean if rival.mean > 0 else None
                for segment, rival in rivals.items()
            },
            "of_offline": {
                segment: asdict(ratio(offline[f"{segment}/1"]["exam"], held_out[str(segment)][str(segment)], seed))
                for segment in range(segments)
                if f"{segment}/1" in offline
            },
            "kept": asdict(ratio(held_out["0"]["0"], held_out[str(max(0, last - 1))]["0"], seed)),
            "returned": alpha(of(rows, last)) / alpha(of(rows, 0)),
        }
    return by_arm


def gain(rows: Sequence[Row], static: Sequence[Row], seed: int, by: str = "tokens") -> Interval:
    """Return Σ of differences by request / tokens (`by` positions of held-out answers).

    Requests are paired, so that text that is easy for both cancels.
    """
    differences = [row["alpha"] - other["alpha"] for row, other in zip(rows, static, strict=True)]
    return interval(differences, [row[by] for row in rows], SAMPLES, seed)


def ratio(before: Sequence[Row], after: Sequence[Row], seed: int) -> Interval:
    """Return α of `after` as a share of that of `before`, on the same answers."""
    before_sums, after_sums = (
        ([row["alpha"] for row in rows], [row["positions"] for row in rows]) for rows in (before, after)
    )
    change = relative_gain(before_sums, after_sums, SAMPLES, seed)
    return Interval(1 + change.mean, 1 + change.low, 1 + change.high)


def of(rows: Sequence[Row], segment: int) -> list[Row]:
    """Return a segment's requests."""
    return [row for row in rows if row["segment"] == segment]


def half(rows: Sequence[Row], segment: int, which: int) -> list[Row]:
    """Return the first (0) or second (1) half of a segment's requests."""
    segment_rows = of(rows, segment)
    middle = len(segment_rows) // 2
    return segment_rows[middle:] if which else segment_rows[:middle]


def alpha(rows: Sequence[Row]) -> float:
    """Return α over all tokens of the requests."""
    return sum(row["alpha"] for row in rows) / sum(row["tokens"] for row in rows)
