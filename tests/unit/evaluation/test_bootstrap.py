"""Intervals over prompts."""

from __future__ import annotations

import numpy as np
import pytest

from distillspec.evaluation.bootstrap import interval, median_interval, ratio_intervals, relative_gain


def test_the_mean_is_a_ratio_of_sums_and_the_interval_encloses_it() -> None:
    result = interval([1, 8, 3], [2, 10, 4], samples=200, seed=0)
    assert result.mean == pytest.approx(12 / 16)
    assert 0.5 <= result.low < result.mean < result.high <= 0.8


def test_the_same_seed_gives_the_same_interval_and_another_seed_another() -> None:
    data = np.random.default_rng(0).random(20), np.ones(20)
    assert interval(*data, samples=50, seed=1) == interval(*data, samples=50, seed=1)
    assert interval(*data, samples=50, seed=1) != interval(*data, samples=50, seed=2)


def test_the_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    """Prompts of different length whose own rates differ: resampling positions would cover far too rarely."""
    rng, hits, truth = np.random.default_rng(3), 0, 0.5
    for trial in range(300):
        lengths = rng.integers(20, 60, 40)
        rates = np.clip(truth + 0.2 * rng.standard_normal(40), 0, 1)
        result = interval(rng.binomial(lengths, rates), lengths, samples=300, seed=trial)
        hits += result.low <= truth <= result.high
    assert 0.89 <= hits / 300 <= 0.985


def test_columns_are_independent_ratios() -> None:
    numerators, denominators = np.array([[1.0, 0.0], [2.0, 4.0]]), np.array([[2.0, 0.0], [2.0, 8.0]])
    first, second = ratio_intervals(numerators, denominators, 100, 0)
    assert first.mean == 0.75
    assert (second.mean, second.low, second.high) == (0.5, 0.5, 0.5)  # resamples without prompt 2 left out


def test_a_ratio_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="above zero"):
        interval([0.0], [0.0], samples=10, seed=0)


def test_the_median_ignores_an_outlier() -> None:
    result = median_interval([1.0, 1.1, 1.2, 90.0, 1.05], samples=200, seed=0)
    assert result.mean == 1.1
    assert result.low >= 1.0


def test_the_paired_bootstrap_is_that_of_the_ratio() -> None:
    gain = relative_gain(([2, 2], [1, 1]), ([3, 3], [1, 1]), 100, 0)
    assert (gain.mean, gain.low, gain.high) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no ratio"):
        relative_gain(([0, 0], [1, 1]), ([3, 3], [1, 1]), 100, 0)
