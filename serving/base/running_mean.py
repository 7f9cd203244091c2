"""Running mean with exponential forgetting."""

from __future__ import annotations


def running_mean(before: float | None, value: float, weight: float) -> float:
    """Return the mean with a new value of this weight, the value alone where there was none before."""
    return value if before is None else before + weight * (value - before)
