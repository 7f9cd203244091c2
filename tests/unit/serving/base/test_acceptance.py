"""Trials: the accepted tokens and the first rejected one, counted alike wherever acceptance is measured."""

from __future__ import annotations

import pytest

from distillspec.serving.base.acceptance import acceptance_rate, count_trials
from distillspec.serving.base.requests import RequestStats
from distillspec.serving.control.base import RowResult


@pytest.mark.parametrize(
    ("accepted", "depth", "trials"), [(0, 0, 0), (0, 1, 1), (0, 4, 1), (2, 4, 3), (3, 4, 4), (4, 4, 4)]
)
def test_statistics_and_results_count_the_same_trials(accepted: int, depth: int, trials: int) -> None:
    stats = RequestStats()
    stats.record_verification(depth, accepted, accepted + 1)
    assert count_trials(accepted, depth) == trials
    assert sum(stats.tried_per_position) == trials
    assert RowResult("a", depth, accepted, accepted + 1).tried == trials


def test_an_answer_that_ends_inside_a_window_counts_its_own_tokens_alone() -> None:
    stats = RequestStats()
    stats.record_verification(5, 4, 2)
    assert (sum(stats.tried_per_position), stats.accepted, stats.acceptance_rate) == (2, 2, 1.0)


def test_there_is_no_rate_before_any_trial() -> None:
    assert acceptance_rate(0, 0) is None
    assert acceptance_rate(1, 4) == 0.25
