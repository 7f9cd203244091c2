"""Reading ahead of switches keeps them from stalling steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy
import pytest

from distillspec.recipes.spin.switches import KINDS, LOAD, SIDES, SWITCHING, StepSeconds, Switches, step_seconds
from distillspec.serving.simulation import make_workload

ALIKE = replace(LOAD, request_spread=0.0)  # requests of a domain are alike, and callers name the domain


def runs(selection: str, *, ahead: bool, seeds: Sequence[int]) -> list[StepSeconds]:
    return [step_seconds(make_workload(ALIKE, 100.0, seed), selection, ahead) for seed in seeds]


def switching(found: Sequence[StepSeconds]) -> list[float]:
    """Return the seconds of all steps with a switch."""
    return [seconds for own in found for seconds in own.switching]


def test_reading_ahead_keeps_switches_from_stalling_steps() -> None:
    ahead, at_once = (runs("goodput", ahead=ahead, seeds=range(1, 11)) for ahead in (True, False))
    usual = float(numpy.median([numpy.median(own.usual) for own in ahead]))
    assert min(len(switching(ahead)), len(switching(at_once))) >= 3
    assert float(numpy.median(switching(at_once))) > 1.7 * usual
    assert float(numpy.percentile(switching(ahead), 75)) < 1.25 * usual
    assert not any(own.reading for own in at_once)


def test_lbss_reads_ahead_of_drawn_drafts() -> None:
    """Its matching is not known ahead, so some switches stall still."""
    ahead, at_once = (switching(runs("lbss", ahead=ahead, seeds=range(1, 4))) for ahead in (True, False))
    assert min(len(ahead), len(at_once)) > 5
    assert float(numpy.mean(ahead)) < float(numpy.mean(at_once))


def test_figures_are_in_usual_steps() -> None:
    found = Switches(runs=2).run()
    assert set(found) == set(SWITCHING)
    for sides in found.values():
        assert set(sides) == set(SIDES)
        for own in sides.values():
            assert own["usual"]["p50"] == pytest.approx(1.0)
            assert own["tokens_per_s"] > 0
            assert all(own[kind]["p50"] <= own[kind]["p99"] <= own[kind]["most"] for kind in KINDS)
        assert sides["ahead"]["reading"]["steps"] > sides["at_once"]["reading"]["steps"] == 0
