"""Costs that follow the machine: learnt from nothing, corrected where they are off, and outliers that teach nothing."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest

from distillspec.serving.base.ladder import Ladder
from distillspec.serving.costs.latency import guessed
from distillspec.serving.costs.live_costs import GUESSED, MEASURED, LiveCosts, Trust
from distillspec.serving.costs.table import CostTable

FLAT = CostTable(((1.0, 2e-2), (5.0, 2.1e-2), (24.0, 4e-2), (64.0, 9e-2), (512.0, 0.7)), 2e-7)


def follow(
    learnt: LiveCosts, truth: Callable[[float, float], float], steps: int, *, spikes: bool = False, seed: int = 1
) -> float:
    """Return the median relative error of predictions in the second half, each made before its step is seen."""
    generator, errors = numpy.random.default_rng(seed), []
    for step in range(steps):
        context, tokens = float(generator.integers(100, 4000)), float(generator.integers(1, 40))
        seconds = truth(context, tokens) * float(generator.normal(1, 0.02))
        errors.append(abs(learnt.table.seconds(context, tokens) / seconds - 1))
        learnt.observe(context, [tokens], 3.0 if spikes and step % 40 == 20 else seconds)
    return float(numpy.median(errors[steps // 2 :]))


def test_costs_are_learnt_from_a_guess_and_followed_and_spikes_are_not() -> None:
    truth = CostTable.line(2e-6, 8e-4, 4e-2)
    learnt = LiveCosts(guessed().target, GUESSED)
    assert follow(learnt, truth.seconds, 200) < 0.03
    assert follow(learnt, truth.seconds, 200, spikes=True) < 0.06
    slower = CostTable.line(4e-6, 1.6e-3, 8e-2)
    assert follow(learnt, slower.seconds, 400) < 0.04


@pytest.mark.parametrize("factor", [0.7, 1.5, 5.0])
def test_a_machine_of_another_speed_is_found_out_in_a_few_steps(factor: float) -> None:
    """From one size alone: all measured costs move together."""
    learnt = LiveCosts(FLAT)
    for _ in range(30):
        learnt.observe(500, [4], factor * FLAT.seconds(500, 4))
    assert learnt.table.seconds(500, 4) == pytest.approx(factor * FLAT.seconds(500, 4), rel=0.03)
    assert learnt.table.seconds(500, 30) == pytest.approx(factor * FLAT.seconds(500, 30), rel=0.1)


def test_a_knot_that_is_off_by_itself_is_corrected_by_itself() -> None:
    """A machine whose costs have a step where the table has none."""

    def truth(context: float, tokens: float) -> float:
        return FLAT.seconds(context, tokens) * (1.5 if tokens > 20 else 1.0)

    learnt = LiveCosts(FLAT)
    assert follow(learnt, truth, 400) < 0.05
    for tokens in (2.0, 12.0, 30.0, 38.0):
        assert learnt.table.seconds(0, tokens) == pytest.approx(truth(0, tokens), rel=0.08)


def test_several_passes_of_one_measurement_are_told_apart_by_their_sizes() -> None:
    """A draft loop over rows that stop one after another."""
    generator, truth = numpy.random.default_rng(0), CostTable(((1.0, 2e-3), (4.0, 2.2e-3), (16.0, 6e-3)))
    learnt = LiveCosts(guessed().draft or FLAT, GUESSED)
    for _ in range(300):
        passes = sorted((float(n) for n in generator.integers(1, 16, generator.integers(1, 5))), reverse=True)
        learnt.observe(0, passes, sum(truth.seconds(0, rows) for rows in passes) * float(generator.normal(1, 0.02)))
    for rows in (1, 5, 8, 16):
        assert learnt.table.seconds(0, rows) == pytest.approx(truth.seconds(0, rows), rel=0.1)


def test_a_draft_that_was_timed_to_cost_a_first_pass_alone_can_be_found_to_cost_more() -> None:
    learnt = LiveCosts(CostTable(((1.0, 0.0), (8.0, 0.0)), first=1e-3))
    for step in range(200):
        length = 1 + step % 4
        learnt.observe(0, [1.0] * length, 1e-3 + length * 3e-4, first=True)
    for length in (1, 4):
        assert learnt.table.first + length * learnt.table.seconds(0, 1) == pytest.approx(1e-3 + length * 3e-4, rel=0.1)


@pytest.mark.parametrize("start", [0.0, 1e-3])
def test_what_a_first_pass_takes_more_is_told_from_the_others(start: float) -> None:
    """Draft loops of one to four tokens. Without it, short loops would look cheap and long ones dear."""
    generator, truth = numpy.random.default_rng(0), CostTable(((1.0, 3e-4), (8.0, 4e-4)), first=9e-4)
    learnt = LiveCosts(CostTable(((1.0, 4e-4), (8.0, 5e-4)), first=start))
    for _ in range(400):
        passes = [1.0] * int(generator.integers(1, 5))
        seconds = truth.first + sum(truth.seconds(0, rows) for rows in passes)
        learnt.observe(0, passes, seconds * float(generator.normal(1, 0.02)), first=True)
    for length in (1, 4):
        loop_s = learnt.table.first + length * learnt.table.seconds(0, 1)
        assert loop_s == pytest.approx(truth.first + length * 3e-4, rel=0.1)


def test_costs_of_rows_and_context_follow_the_machine() -> None:
    prior = CostTable(FLAT.knots, 2e-6, 1e-3)
    learnt = LiveCosts(prior)
    for _ in range(50):
        learnt.observe(3000, [8], 2 * prior.seconds(3000, 8, 8), 8)
    assert learnt.table.seconds(3000, 8, 8) == pytest.approx(2 * prior.seconds(3000, 8, 8), rel=0.02)
    assert learnt.table.per_row == pytest.approx(2e-3, rel=0.2)
    assert learnt.table.per_context == pytest.approx(4e-6, rel=0.3)


def test_more_tokens_are_never_believed_to_cost_less_than_fewer() -> None:
    """Steps of a machine that is slow on one token, and of one whose costs are flat."""
    for seconds in (lambda tokens: 5e-2 if tokens == 1 else FLAT.seconds(0, tokens), lambda tokens: 3e-2):
        learnt, generator = LiveCosts(FLAT), numpy.random.default_rng(4)
        for _ in range(100):
            tokens = float(generator.integers(1, 12))
            learnt.observe(100, [tokens], seconds(tokens))
        costs = [learnt.table.seconds(100, tokens) for tokens in range(1, 600)]
        assert costs == pytest.approx(numpy.maximum.accumulate(costs).tolist())


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_no_clock_gives_are_left_out(seconds: float) -> None:
    learnt = LiveCosts(FLAT)
    before = learnt.table
    assert not learnt.observe(100, [5], seconds)
    assert not learnt.observe(100, [], 1.0)
    assert learnt.table == before


def test_a_guess_is_no_measure_of_a_prediction_until_it_was_corrected() -> None:
    learnt = LiveCosts(FLAT, GUESSED)
    sure = [learnt.observe(100, [4], FLAT.seconds(100, 4)) for _ in range(10)]
    assert not sure[0]
    assert sure[-1]
    assert not learnt.observe(100, [400], FLAT.seconds(100, 400)), "nothing of that size was seen"
    assert LiveCosts(FLAT, MEASURED).observe(100, [400], 1.0), "measured before"


def test_a_recorded_pass_teaches_the_number_that_it_ran_as() -> None:
    """Passes over 33 … 40 tokens run as 40. What they take corrects the knot of 40, and none below."""
    prior = replace(FLAT, recorded=Ladder.tokens(64))
    learnt = LiveCosts(prior, Trust(0.0, 0.0, 0.3, 0.0, 0.0, 0.1))
    for turn in range(60):
        learnt.observe(0, [33 + turn % 8], 1.5 * FLAT.seconds(0, 40))
    table = learnt.table
    assert table.recorded == prior.recorded
    for tokens in (33, 36, 40):
        assert table.seconds(0, tokens) == pytest.approx(1.5 * FLAT.seconds(0, 40), rel=0.05)
    for tokens in (1, 8, 24):
        assert table.seconds(0, tokens) == pytest.approx(FLAT.seconds(0, tokens), rel=0.05)
