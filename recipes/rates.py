"""Rates of the sides of a comparison, paired by round."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence


def ratios(rates: Mapping[str, Sequence[float]], name: str, other: str) -> list[float]:
    """Return a side's rate over another's, by round."""
    return [rate / other_rate for rate, other_rate in zip(rates[name], rates[other], strict=True)]


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the geometric mean of ratios, and two standard errors around it."""
    logs = [math.log(ratio) for ratio in values]
    mean, half = statistics.fmean(logs), 0.0
    if len(logs) > 1:
        half = 2 * statistics.stdev(logs) / len(logs) ** 0.5
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)


def shown(bounds: Sequence[float], places: int = 2) -> str:
    """Return an interval for a table, with so many decimal places."""
    mean, low, high = (f"{value:.{places}f}" for value in bounds)
    return f"{mean} [{low}, {high}]"


def best_of(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Return the best of some sides by its median."""
    return max(names, key=lambda name: statistics.median(rates[name]))


def best_on_odd(rates: Mapping[str, Sequence[float]], names: Sequence[str]) -> str:
    """Return the best of some sides by its median over rounds 1, 3, …."""
    return best_of({name: rates[name][::2] for name in names}, names)
