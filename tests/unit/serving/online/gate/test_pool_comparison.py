"""A pool with a specialist against the pool without it: gains, costs, and simulated verdicts."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillspec.serving.online.gate.decision import GateDecision, decide
from distillspec.serving.online.gate.pool_comparison import MOST, PoolComparison, lost_to_memory
from distillspec.types import Interval

from .conftest import CONFIG, evidence, pairs


def test_the_pool_gains_what_the_domain_gains_in_its_share_of_the_time() -> None:
    half = PoolComparison(0.5)
    assert half.pool_gain(1.0) == pytest.approx(1 / 0.75 - 1)  # half of the time becomes a quarter
    assert PoolComparison(1.0).pool_gain(0.2) == pytest.approx(0.2)
    assert half.pool_gain(0.0) == pytest.approx(0.0)
    assert replace(half, trials=0.02, memory=0.1).pool_gain(0.0) == pytest.approx(0.98 * 0.9 - 1)
    interval = half.interval(Interval(0.2, 0.1, 0.3))
    assert [interval.mean, interval.low, interval.high] == [half.pool_gain(gain) for gain in (0.2, 0.1, 0.3)]


@given(st.floats(0.05, 1), st.floats(0, 0.05), st.floats(0, 0.05), st.floats(0, 0.05))
def test_the_least_gain_is_where_the_pool_gains_the_margin(
    share: float, trials: float, memory: float, margin: float
) -> None:
    pool = PoolComparison(share, trials, memory)
    least = pool.least_gain(margin)
    if least < MOST:
        assert pool.pool_gain(least) == pytest.approx(share * margin, abs=1e-9)
    else:
        assert pool.pool_gain(MOST) <= share * margin + 1e-9


def test_without_costs_the_least_gain_is_nearly_the_margin_and_costs_weigh_more_on_rare_domains() -> None:
    assert PoolComparison(0.25).least_gain(0.01) == pytest.approx(0.01, abs=2e-4)
    often, seldom = (PoolComparison(share, trials=0.01).least_gain(0.01) for share in (0.5, 0.1))
    assert 0.025 < often < 0.035
    assert 0.1 < seldom < 0.14
    assert PoolComparison(0.0).least_gain(0.01) == PoolComparison(0.005, trials=0.02).least_gain(0.01) == MOST


def test_slots_that_nobody_needs_cost_nothing() -> None:
    def step_s(rows: int) -> float:
        return 0.02 + 0.001 * rows

    assert lost_to_memory(3.6, 4, step_s) == 0.0
    assert lost_to_memory(8, 4, step_s) == pytest.approx(1 - (4 / 0.024) / (8 / 0.028))
    assert lost_to_memory(8, 4) == 0.5  # where steps cost the same for any rows
    assert lost_to_memory(8, 0, step_s) == 1.0


def verdict(gain: float, pool: PoolComparison, seed: int = 0) -> GateDecision | None:
    """Judge a simulated specialist, whose acceptance on the domain is by `gain` higher, as its answers come in."""
    dice = numpy.random.default_rng(seed)
    before = dice.uniform(0.25, 0.45, CONFIG.requests)
    after = numpy.clip(before + gain + 0.05 * dice.standard_normal(CONFIG.requests), 0.02, 0.98)
    found = pairs(before.tolist(), after.tolist())
    config = replace(CONFIG, margin=pool.least_gain(CONFIG.margin))
    looks = (
        decide("new", "old", evidence(found[:count]), config, 1)
        for count in range(config.min_requests, len(found) + 1, 4)
    )
    return next((each for each in looks if each is not None), None)


def entered(gain: float, pool: PoolComparison) -> int:
    """Return how many of 20 specialists enter."""
    found = [verdict(gain, pool, seed) for seed in range(20)]
    return sum(each is not None and each.decision == "promoted" for each in found)


def test_a_specialist_that_helps_its_domain_enters_and_one_that_does_not_is_refused() -> None:
    pool = PoolComparison(0.3, trials=0.01)
    assert entered(0.25, pool) >= 19
    assert entered(0.0, pool) == 0
    assert entered(-0.1, pool) == 0


def test_what_helps_a_large_domain_does_not_pay_on_a_rare_one_nor_where_it_takes_slots() -> None:
    assert entered(0.1, PoolComparison(0.6, trials=0.01)) >= 18
    assert entered(0.1, PoolComparison(0.05, trials=0.01)) == 0
    assert entered(0.1, PoolComparison(0.6, trials=0.01, memory=0.1)) == 0
