"""Several drafts simulated: regret against the oracle, and what reading ahead is worth."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.config.simulation import WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.simulation import (
    Hardware,
    SimulatedRequest,
    Simulation,
    SimulationResult,
    load_hardware,
    load_workload,
    make_policy,
    make_workload,
)

SMALL, LARGE = CostTable.line(1e-8, 5e-5, 1e-3), CostTable.line(1e-8, 1e-4, 4e-3)
COSTS = LatencyModel(CostTable.line(1e-7, 4e-4, 2e-2), SMALL, members={"a": SMALL, "b": SMALL, "large": LARGE})
MACHINE = Hardware(COSTS, cache_tokens=100_000, slots=4, max_len=2048)
LOAD = WorkloadConfig(
    requests=160,
    prompt_tokens=100,
    output_tokens=64,
    alphas={"maths": {"a": 0.75, "b": 0.3, "large": 0.6}, "sql": {"a": 0.3, "b": 0.75, "large": 0.6}},
)


def requests(count: int = 160, seed: int = 1) -> list[SimulatedRequest]:
    return make_workload(replace(LOAD, requests=count), 100.0, seed)


def run(selection: str, asked: list[SimulatedRequest], policy: str = "goodput") -> tuple[float, SimulationResult]:
    """Return the tokens a second and the result."""
    made = make_policy(policy, COSTS, asked, selection=selection)
    result = Simulation(asked, made, MACHINE).run()
    last = result.steps[-1]
    return sum(request.output_tokens for request in asked) / (last.at_s + last.seconds), result


def test_goodput_comes_near_the_oracle_and_beats_each_draft_alone() -> None:
    asked = requests()
    rates = {name: run(name, asked)[0] for name in ("goodput", "oracle", "random", "a", "b")}
    assert rates["goodput"] > 1.06 * max(rates["a"], rates["b"])
    assert rates["goodput"] > 0.92 * rates["oracle"]
    assert rates["goodput"] > 1.1 * rates["random"]


def test_each_draft_is_accepted_as_its_trace_says() -> None:
    asked = requests(60)
    _, result = run("random", asked, "fixed-3")
    tried, accepted = {"a": 0, "b": 0, "large": 0}, {"a": 0, "b": 0, "large": 0}
    for request, stats in zip(result.requests, result.stats, strict=True):
        for draft, trace in request.traces.items():
            tried[draft] += len(trace.ranks)
            accepted[draft] += int((numpy.array(trace.ranks) == 1).sum())
        assert stats.acceptance.tried > 0
    assert accepted["large"] / tried["large"] == pytest.approx(0.6, abs=0.03)
    assert accepted["a"] / tried["a"] == pytest.approx(0.525, abs=0.05)


def switch_steps(selection: str, *, ahead: bool, seeds: range = range(1, 4)) -> tuple[list[float], float]:
    """Return the seconds of steps in which a running row came to another draft, and those of a usual step."""
    runs = [_switch_steps(selection, ahead, seed) for seed in seeds]
    return [seconds for found, _ in runs for seconds in found], float(numpy.median([own for _, own in runs]))


def _switch_steps(selection: str, ahead: bool, seed: int) -> tuple[list[float], float]:
    asked = make_workload(replace(LOAD, requests=20, prompt_tokens=900, output_tokens=160), 100.0, seed)
    policy = make_policy("fixed-2", COSTS, asked, selection=selection)
    chooses = selecting(policy.controller)
    assert chooses is not None
    chooses.selection.fast_switching = ahead  # type: ignore[attr-defined]
    simulation, before, found, usual = Simulation(asked, policy, MACHINE), dict[str, str | None](), [], []
    while len(simulation.arrived) < len(asked) or simulation.sequences.unfinished:
        result = simulation.step()
        if result is None or result.plan.chosen is None or result.prefill_tokens:
            continue
        chosen = {
            row: source for row, source in result.plan.chosen.items() if source is not None
        }  # else none can draft
        switched = any(before.get(row, source) != source for row, source in chosen.items())
        new = any(row not in before for row in chosen)
        if not new:
            (found if switched else usual).append(result.total_s)
        before.update(chosen)
    return found, float(numpy.median(usual))


def test_reading_ahead_keeps_switches_from_stalling_steps() -> None:
    ahead, usual = switch_steps("goodput", ahead=True, seeds=range(1, 11))
    at_once, _ = switch_steps("goodput", ahead=False, seeds=range(1, 11))
    assert min(len(ahead), len(at_once)) >= 3
    assert float(numpy.median(at_once)) > 1.7 * usual
    assert float(numpy.percentile(ahead, 75)) < 1.25 * usual


def test_lbss_reads_ahead_of_drawn_drafts() -> None:
    """Its matching is not known ahead, so some switches stall still."""
    ahead, _ = switch_steps("lbss", ahead=True)
    at_once, _ = switch_steps("lbss", ahead=False)
    assert min(len(ahead), len(at_once)) > 5
    assert float(numpy.mean(ahead)) < float(numpy.mean(at_once))


def test_the_machines_of_the_paper_are_there() -> None:
    hardware, workload = load_hardware("a100-7b-five"), load_workload("five-domains")
    assert set(hardware.latency.members) == set(workload.alphas["chat"])
    costs = [table.seconds(0, 1) for table in hardware.latency.members.values()]
    assert costs == sorted(costs)
    asked = make_workload(replace(workload, requests=20), 8.0, 0)
    assert {request.domain for request in asked} <= set(workload.alphas)
    result = Simulation(asked, make_policy("goodput", hardware.latency, asked), hardware).run()
    assert all(stats.finished_s is not None for stats in result.stats)
    plain = Simulation(asked, make_policy("none", hardware.latency, asked), hardware).run()
    assert all(stats.proposed == 0 for stats in plain.stats)


def test_names_are_checked() -> None:
    with pytest.raises(ConfigError, match="selections: best is no selection and no draft"):
        make_policy("goodput", COSTS, requests(2), selection="best")
    with pytest.raises(ConfigError, match="policy oracle knows one draft"):
        make_policy("oracle", COSTS, requests(2))
