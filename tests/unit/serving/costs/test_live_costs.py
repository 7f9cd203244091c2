"""Costs learnt from steps: lines, experts, bumps, and outliers that teach nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.serving.costs.table import CostTable


def work(generator: numpy.random.Generator) -> tuple[float, float, float]:
    return float(generator.integers(100, 4000)), float(generator.integers(1, 40)), 1.0


def test_costs_are_learnt_and_followed_and_spikes_are_not() -> None:
    generator = numpy.random.default_rng(1)
    truth = CostTable.line(2e-6, 8e-4, 4e-2)
    learnt = CostCalibration(CostTable.line(1e-7, 1e-3, 2e-2), confidence=1e-2)

    def watch(steps: int, truth: CostTable, spikes: bool = False) -> float:
        """The median relative error of predictions, made before each step is seen."""
        errors = []
        for step in range(steps):
            context, tokens, passes = work(generator)
            seconds = truth.seconds(context, tokens) * float(generator.normal(1, 0.02))
            errors.append(abs(learnt.cost.seconds(context, tokens) / seconds - 1))
            learnt.observe(context, tokens, passes, 3.0 if spikes and step % 40 == 20 else seconds)
        return float(numpy.median(errors[steps // 2 :]))

    assert watch(200, truth) < 0.03
    assert watch(200, truth, spikes=True) < 0.06
    slower = CostTable.line(4e-6, 1.6e-3, 8e-2)
    assert watch(400, slower) < 0.04


def test_the_cost_of_experts_is_learnt() -> None:
    generator = numpy.random.default_rng(2)
    truth = CostTable.line(0, 1e-4, 5e-3, per_expert=4e-3, experts=8, active=2)
    learnt = CostCalibration(replace(truth, per_expert=0.0, fixed=2e-2), confidence=1e-2)
    for _ in range(300):
        tokens = float(generator.integers(1, 40))
        learnt.observe(100, tokens, 1, truth.seconds(100, tokens))
    for tokens in (1.0, 4.0, 30.0):
        assert learnt.cost.seconds(100, tokens) == pytest.approx(truth.seconds(100, tokens), rel=0.02)


@pytest.mark.parametrize("slower", [1.0, 2.0])
def test_a_line_that_is_off_is_followed_as_it_is_off(slower: float) -> None:
    generator = numpy.random.default_rng(3)
    profile = CostTable.line(1e-6, 1e-3, 2e-2, bumps=((1.0, -5e-3), (4.0, 2e-2), (8.0, 1.7e-2)))
    assert profile.seconds(0, 6) == pytest.approx(2e-2 + 6e-3 + 1.85e-2)  # halfway down from 4 to 8
    bumps = tuple((tokens, slower * seconds) for tokens, seconds in profile.bumps)
    truth = CostTable.line(slower * 1e-6, slower * 1e-3, slower * 2e-2, bumps=bumps)
    learnt = CostCalibration(profile, confidence=1.0)
    for _ in range(200):
        tokens = float(generator.integers(1, 12))
        learnt.observe(100, tokens, 1, truth.seconds(100, tokens))
    for tokens in (1.0, 4.0, 11.0):
        assert learnt.cost.seconds(100, tokens) == pytest.approx(truth.seconds(100, tokens), rel=0.02)


def test_more_tokens_are_never_believed_to_cost_less_than_fewer() -> None:
    """Steps of a machine that is slow on one token, and of one whose line flattens under the profile's bumps."""
    generator = numpy.random.default_rng(4)
    slow_on_one = CostTable.line(1e-6, 1e-3, 2e-2, bumps=((1.0, 8e-3), (2.0, 0.0), (8.0, 2e-2)))
    stairs = CostTable.line(1e-6, 2e-3, 2e-2, bumps=((1.0, 0.0), (4.0, 6e-3), (8.0, -2e-3), (9.0, 9e-3)))
    for profile, seconds in ((slow_on_one, slow_on_one.seconds), (stairs, lambda context, tokens: 3e-2)):
        learnt = CostCalibration(profile, confidence=1.0)
        for _ in range(100):
            tokens = float(generator.integers(1, 12))
            learnt.observe(100, tokens, 1, seconds(100, tokens))
        costs = [learnt.cost.seconds(100, tokens) for tokens in range(1, 12)]
        assert costs == pytest.approx(numpy.maximum.accumulate(costs).tolist())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_no_clock_gives_are_left_out(seconds: float) -> None:
    learnt = CostCalibration(CostTable.line(1e-6, 1e-3, 1e-2))
    before = learnt.cost
    learnt.observe(100, 5, 1, seconds)
    learnt.observe(100, 5, 0, 1.0)
    assert learnt.cost == before
