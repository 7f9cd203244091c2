"""Asymptotic confidence sequence: an interval that may be looked at after every answer.

Waudby-Smith, Arbour, Sinha, Kennedy & Ramdas (2021), "Time-uniform central limit theory and asymptotic confidence
sequences", Theorem 2.2: with probability 1 − α the mean lies within

    σ · √( 2 (n ρ² + 1) / (n² ρ²) · log( √(n ρ² + 1) / α ) )

of the average at all n. ρ is the paper's choice for the narrowest interval at one n (`TUNED_AT`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy

from distillspec.types import Interval

TUNED_AT = 60  # values at which the interval is the narrowest it can be
PLAUSIBLE = 1.64  # standard errors that a mean may lie above its average, in 95 of 100 cases


def confidence_sequence(values: Sequence[float], error: float) -> Interval:
    """Return the average of n values with an interval that holds at all n at once.

    Args:
        error: α, the probability that the mean is ever outside.
    """
    n = len(values)
    mean = float(numpy.mean(values)) if n else 0.0
    if n < 2:
        return Interval(mean, -math.inf, math.inf)
    width = float(numpy.std(values, ddof=1)) * _width(n, error)
    return Interval(mean, mean - width, mean + width)


def plausible_lower_end(values: Sequence[float], error: float, later: int) -> float:
    """Return the lower end of the interval at `later` values, if the mean were as high as is plausible by now."""
    n = len(values)
    if n < 2:
        return math.inf
    spread = float(numpy.std(values, ddof=1))
    return float(numpy.mean(values)) + PLAUSIBLE * spread / math.sqrt(n) - spread * _width(max(n, later), error)


def _width(n: int, error: float) -> float:
    """Return half the width of the interval at n values, in their standard deviations."""
    rho2 = (-2 * math.log(error) + math.log(-2 * math.log(error)) + 1) / TUNED_AT
    log_term = math.log(math.sqrt(n * rho2 + 1) / error)
    return math.sqrt(2 * (n * rho2 + 1) / (n * n * rho2) * log_term)


def spent(error: float, number: int) -> float:
    """Return the part of an error for the candidate `number` (1, 2, …) of an endless stream: Σ = `error`."""
    return error * 6 / (math.pi * number) ** 2
