"""Micro-batches simulated: drafting hides behind verification, and who waits for whom."""

from __future__ import annotations

from dataclasses import replace

import pytest

from distillspec.config.simulation import WorkloadConfig
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.simulation import Hardware, Simulation, make_policy, make_workload
from distillspec.serving.simulation.figures import RunFigures, figures_of

# Verifying costs by the token, as where arithmetic is the limit: two halves cost what the whole does.
BY_TOKEN = LatencyModel(CostTable.line(0.0, 1e-3, 1e-4), CostTable.line(0.0, 1e-3, 1e-4))
# Reading the weights is all: two halves cost twice the whole.
BY_PASS = LatencyModel(CostTable.line(0.0, 1e-7, 2e-2), CostTable.line(0.0, 1e-7, 2e-3))
LOAD = WorkloadConfig(requests=48, prompt_tokens=20, output_tokens=64, alpha=0.7)


def figures(costs: LatencyModel, count: int, policy: str = "fixed-2") -> RunFigures:
    machine = Hardware(costs, cache_tokens=100_000, slots=8, max_len=512, micro_batches=count)
    asked = make_workload(LOAD, 1000.0, 1)
    return figures_of(policy, None, Simulation(asked, make_policy(policy, costs, asked), machine).run())


def test_drafting_hides_behind_verification_where_halves_cost_half() -> None:
    found = {count: figures(BY_TOKEN, count) for count in (1, 2, 4)}
    assert found[1].draft_idle + found[1].target_idle == pytest.approx(1.0, abs=0.01)  # one works, the other waits
    rates = [own.tokens_per_s for own in found.values()]
    assert rates[1] > 1.2 * rates[0]
    assert rates[2] > rates[1]
    assert found[4].target_idle < found[2].target_idle < found[1].target_idle
    assert {own.requests for own in found.values()} == {48}


def test_splitting_loses_where_a_pass_costs_the_same_for_fewer_rows() -> None:
    assert figures(BY_PASS, 2).tokens_per_s < 0.7 * figures(BY_PASS, 1).tokens_per_s


@pytest.mark.parametrize("costs", [BY_TOKEN, BY_PASS])
def test_as_many_as_pay_is_no_worse_than_any_number(costs: LatencyModel) -> None:
    best = max(figures(costs, count).tokens_per_s for count in range(1, 9))
    assert figures(costs, 0).tokens_per_s >= 0.999 * best


def test_several_drafts_are_told_apart_in_micro_batches() -> None:
    members = {name: BY_TOKEN.draft for name in ("a", "b") if BY_TOKEN.draft is not None}
    costs = replace(BY_TOKEN, members=members)
    load = replace(LOAD, alphas={"x": {"a": 0.8, "b": 0.2}})
    asked = make_workload(load, 1000.0, 1)
    machine = Hardware(costs, cache_tokens=100_000, slots=8, max_len=512, micro_batches=3)
    simulation = Simulation(asked, make_policy("fixed-2", costs, asked, selection="random"), machine)
    seen = set()
    for _ in range(40):
        result = simulation.step()
        if result is not None:
            seen |= set(result.drafted_s)
            assert sum(result.drafted_s.values()) + result.readings_s == pytest.approx(result.draft_s)
    assert seen == {"a", "b"}
