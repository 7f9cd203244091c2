"""Regret curves: fits of curves whose growth is known, and traces that stay or drift."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.recipes.spin import regret
from distillspec.recipes.spin.regret import FEWEST, LEARNING, TRACES, Regret, fits
from distillspec.recipes.spin.switches import LOAD, MACHINE
from distillspec.serving.simulation import make_workload


def test_fits_tell_logarithmic_growth_from_linear() -> None:
    at = numpy.arange(8.0, 400.0)
    log, line = fits(at, 3 + 2 * numpy.log2(at)), fits(at, 1 + 0.25 * at)
    assert log["log2"] == {"slope": pytest.approx(2.0), "r2": pytest.approx(1.0)}
    assert log["linear"]["r2"] < 0.9
    assert line["linear"] == {"slope": pytest.approx(0.25), "r2": pytest.approx(1.0)}
    assert line["log2"]["r2"] < 0.9
    assert fits(at, 0 * at)["log2"]["r2"] == 0.0


@pytest.mark.parametrize("trace", TRACES)
def test_each_trace_has_a_curve_of_each_selection(trace: str) -> None:
    curves = Regret(answers=9, seeds=1).run(trace)
    assert curves["answers"] == sorted(set(curves["answers"]))
    assert curves["answers"][-1] == 9
    assert set(curves["regret"]) == set(curves["fits"]) == set(LEARNING)
    assert all(len(regret) == len(curves["answers"]) for regret in curves["regret"].values())


def test_seeds_that_agree_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = make_workload(replace(LOAD, requests=9, output_tokens=16), 1e6, 0)
    study = Regret(seeds=5, policy="fixed-2")
    monkeypatch.setattr(regret, "NARROW", 0.0)
    wide = study.curves(requests, MACHINE)
    assert wide["seeds"]["epsilon_greedy"] == 5, "its draws differ"
    monkeypatch.setattr(regret, "NARROW", 10.0)
    narrow = study.curves(requests, MACHINE)
    assert set(narrow["seeds"].values()) == {FEWEST}
    assert 0 < wide["two_errors"]["epsilon_greedy"] < 9
