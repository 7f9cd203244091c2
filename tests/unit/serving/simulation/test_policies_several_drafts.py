"""Several drafts simulated: each is accepted as its trace says, and goodput comes near the oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.config.simulation import WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
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
    with pytest.raises(ConfigError, match="selection_options"):
        make_policy("goodput", COSTS, requests(2), selection="goodput", selection_options={"fast": True})
