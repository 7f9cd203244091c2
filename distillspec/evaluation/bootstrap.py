"""Percentile bootstrap over prompts (Efron & Tibshirani, An Introduction to the Bootstrap, ch. 13).

Positions of one response resemble each other, so prompts are resampled, never positions. Every statistic is
a ratio of sums, so that long responses weigh as much as their tokens do.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from distillspec.types import Interval

QUANTILES = (0.025, 0.975)


def interval(per_prompt_numerators: ArrayLike, per_prompt_denominators: ArrayLike, samples: int, seed: int) -> Interval:
    """Return Σ numerators / Σ denominators, both `[P]`, with its 95 % interval, as `ratio_intervals` computes it."""
    numerators = np.asarray(per_prompt_numerators, dtype=np.float64)[:, None]
    denominators = np.asarray(per_prompt_denominators, dtype=np.float64)[:, None]
    return ratio_intervals(numerators, denominators, samples, seed)[0]


def ratio_intervals(
    numerators: NDArray[np.float64], denominators: NDArray[np.float64], samples: int, seed: int
) -> list[Interval]:
    """Return one interval a column of `numerators [P, M]` and `denominators [P, M]`, for P prompts.

    All columns share their resamples. A resample whose denominators are all zero is left out. With a single
    prompt the interval has no width: it says nothing about other prompts.

    Raises:
        ValueError: a column's denominators sum to zero, so that the ratio does not exist.
    """
    totals = denominators.sum(0)
    if not (totals > 0).all():
        raise ValueError(f"bootstrap: denominators sum to {totals.tolist()}; every one must be above zero")
    return intervals_of(numerators.sum(0) / totals, resampled_ratios(numerators, denominators, samples, seed))


def resampled_ratios(
    numerators: NDArray[np.float64], denominators: NDArray[np.float64], samples: int, seed: int
) -> NDArray[np.float64]:
    """Return the ratios of `ratio_intervals` in every resample, `[S, M]`, NaN where all denominators are zero."""
    weights = _resample_weights(len(numerators), samples, seed)
    below = weights @ denominators
    return np.divide(weights @ numerators, below, out=np.full(below.shape, np.nan), where=below > 0)


def intervals_of(values: ArrayLike, resampled: NDArray[np.float64]) -> list[Interval]:
    """Return `values [M]` with the 95 % intervals of their resamples `[S, M]`. NaN resamples are left out."""
    low, high = np.nanquantile(resampled, QUANTILES, axis=0)
    means = np.asarray(values, dtype=np.float64)
    return [Interval(float(m), float(a), float(b)) for m, a, b in zip(means, low, high, strict=True)]


def median_interval(values: Sequence[float], samples: int, seed: int) -> Interval:
    """Return the median of one value a prompt with its 95 % interval. `mean` holds the median."""
    observed = np.asarray(values, dtype=np.float64)
    drawn = np.random.default_rng(seed).integers(len(observed), size=(samples, len(observed)))
    low, high = np.quantile(np.median(observed[drawn], axis=1), QUANTILES)
    return Interval(float(np.median(observed)), float(low), float(high))


def _resample_weights(prompts: int, samples: int, seed: int) -> NDArray[np.float64]:
    """Return `[S, P]`: the count of each prompt in each resample of P prompts with replacement."""
    counts = np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), size=samples)
    return counts.astype(np.float64)


def relative_gain(
    before: tuple[ArrayLike, ArrayLike], after: tuple[ArrayLike, ArrayLike], samples: int, seed: int
) -> Interval:
    """Return (Σ/Σ of `after`) / (Σ/Σ of `before`) − 1, with its 95 % interval.

    Both are numerators and denominators `[P]` of the same P prompts, in order. A resample takes a prompt's four numbers
    together, so that a prompt's difficulty cancels.

    Raises:
        ValueError: the denominators, or the numerators of `before`, sum to zero.
    """
    columns = np.stack([np.asarray(values, dtype=np.float64) for values in (*before, *after)], axis=1)
    totals = columns.sum(0)
    if not (totals[[0, 1, 3]] > 0).all():
        raise ValueError(f"bootstrap: sums {totals.tolist()} give no ratio to compare")
    resampled = _resample_weights(len(columns), samples, seed) @ columns
    with np.errstate(divide="ignore", invalid="ignore"):
        gains = resampled[:, 2] * resampled[:, 1] / (resampled[:, 3] * resampled[:, 0]) - 1
    low, high = np.nanquantile(np.where(np.isfinite(gains), gains, np.nan), QUANTILES)
    return Interval(float(totals[2] * totals[1] / (totals[3] * totals[0]) - 1), float(low), float(high))


def paired_difference(
    before: tuple[ArrayLike, ArrayLike], after: tuple[ArrayLike, ArrayLike], samples: int, seed: int
) -> Interval:
    """Return the ratio Σ/Σ of `after` less that of `before`, with its 95 % interval. Arguments as in `relative_gain`.

    Raises:
        ValueError: denominators sum to zero.
    """
    sides = [[np.asarray(values, dtype=np.float64)[:, None] for values in side] for side in (before, after)]
    first, second = (ratio_intervals(above, below, samples, seed)[0].mean for above, below in sides)
    # The same seed takes the same prompts on both sides.
    drawn = [resampled_ratios(above, below, samples, seed) for above, below in sides]
    return intervals_of([second - first], drawn[1] - drawn[0])[0]
