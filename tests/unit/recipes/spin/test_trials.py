"""Cost of trials, measured beside selections that know."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.recipes.spin.runs import draft_rates, rate, simulation
from distillspec.recipes.spin.switches import LOAD, MACHINE
from distillspec.recipes.spin.trials import LEARNT, cost_of_trials, piece_rates
from distillspec.serving.simulation import make_workload

ASKED = make_workload(replace(LOAD, requests=60, prompt_tokens=100, output_tokens=64), 1e6, 1)
BEST = "b"


def test_learning_costs_what_a_selection_that_has_learnt_writes_more() -> None:
    figures = cost_of_trials(MACHINE, ASKED, "fixed-3", BEST)
    assert 0 < figures["explored"] < 1
    assert 0 < figures["lost"] < figures["explored"]
    assert set(figures["over"]) == {LEARNT, BEST}
    learnt = figures["over"][LEARNT]
    assert learnt["ratio"] == pytest.approx(figures["tokens_per_s"] / learnt["tokens_per_s"])
    assert learnt["ratio"] < 1, "finding out costs something"
    assert learnt["explored"] == figures["over"][BEST]["explored"] == 0, "who knows tries nothing"
    assert figures["over"][BEST]["tokens_per_s"] == rate(simulation(MACHINE, ASKED, "fixed-3", BEST).run())
    assert learnt["interval"][1] <= learnt["interval"][0] <= learnt["interval"][2]
    assert len(learnt["by_piece"]) == 60 // (4 * 4), "a piece has four answers of each row"


def test_pieces_of_a_run_have_all_its_tokens_and_seconds() -> None:
    result = simulation(MACHINE, ASKED, "fixed-3", BEST).run()
    (whole,) = piece_rates(result, 1)
    assert whole == pytest.approx(rate(result))
    rates = piece_rates(result, 3)
    assert min(rates) < whole < max(rates)
    pairs = zip(result.requests, result.stats, strict=True)
    ends = sorted((stats.finished_s or 0.0, request.output_tokens) for request, stats in pairs)
    assert rates[0] == pytest.approx(sum(tokens for _, tokens in ends[:20]) / ends[19][0])


def test_the_best_draft_is_that_of_the_highest_rate() -> None:
    rates = draft_rates(MACHINE, ASKED, "fixed-3")
    assert set(rates) == set(MACHINE.latency.members)
    assert max(rates, key=lambda draft: rates[draft]) == BEST
