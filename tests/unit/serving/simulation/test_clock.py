"""The event clock: exact times by hand, nothing lost, nothing twice, and the cache never overdrawn."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.config import WorkloadConfig
from distillspec.errors import ConfigError
from distillspec.serving.costs.hardware_profile import HostCost
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.simulation import (
    Hardware,
    SimulatedRequest,
    Simulation,
    SimulationResult,
    make_policy,
    make_workload,
)
from distillspec.serving.simulation.acceptance_trace import AcceptanceTrace
from distillspec.serving.simulation.figures import figures_of

COSTS = LatencyModel(CostTable.line(1e-3, 1e-2, 1.0), CostTable.line(0.0, 0.0, 0.1))
SMALL = Hardware(COSTS, cache_tokens=1000, slots=4, max_len=200, prefill_chunk=64)
FAST = Hardware(
    LatencyModel(CostTable.line(3e-7, 1.2e-4, 1e-2), CostTable.line(2e-8, 3e-6, 1.5e-3)), cache_tokens=100_000, slots=64
)
POLICIES = ("none", "fixed-3", "goodput", "goodput-global", "random", "random-request", "confidence", "medusa")


def request(name: str, arrival_s: float, prompt: int, output: int, ranks: list[int] | None = None) -> SimulatedRequest:
    trace = AcceptanceTrace(numpy.array(ranks or [1] * output), numpy.full(output, 0.7))
    return SimulatedRequest(name, arrival_s, prompt, output, trace)


def served(
    policy: str, requests: list[SimulatedRequest], hardware: Hardware = SMALL, seed: int = 0
) -> SimulationResult:
    return Simulation(requests, make_policy(policy, hardware.latency, requests, seed=seed), hardware, seed).run()


def test_two_requests_without_speculation_by_hand() -> None:
    result = served("none", [request("a", 0.0, 4, 3), request("b", 0.5, 2, 2)])
    # a's prompt: 4 · 0.01 + 1; a at 5 tokens beside b's prompt: 0.005 + 3 · 0.01 + 1; both: 0.009 + 2 · 0.01 + 1
    assert [step.seconds for step in result.steps] == pytest.approx([1.04, 1.035, 1.029])
    a, b = result.stats
    assert (a.first_token_s, a.finished_s) == pytest.approx((1.04, 3.104))
    assert (b.admitted_s, b.first_token_s, b.finished_s) == pytest.approx((1.04, 2.075, 3.104))
    assert b.total_s == pytest.approx(2.604)


def test_the_hosts_time_of_each_step_and_row_passes() -> None:
    slow = replace(SMALL, host=HostCost(0.1, 0.02))
    result = served("none", [request("a", 0.0, 4, 3), request("b", 0.5, 2, 2)], slow)
    assert [step.seconds for step in result.steps] == pytest.approx([1.04 + 0.12, 1.035 + 0.14, 1.029 + 0.14])


def test_two_requests_with_speculation_by_hand() -> None:
    result = served("fixed-2", [request("a", 0.0, 4, 3), request("b", 0.5, 2, 4, [1, 1, 5, 1])])
    # a has room for one drafted token beside the target's own: 0.1 drafting, 4 tokens read. Then b alone at 3 tokens
    # drafts two. The first is accepted, the second is not, so its last token comes in a step of its own.
    assert [step.seconds for step in result.steps] == pytest.approx([1.04, 0.1 + 1.045, 0.2 + 1.033, 1.015])
    assert result.stats[0].finished_s == pytest.approx(2.185)
    assert [step.emitted for step in result.steps] == [0, 2, 2, 1]
    assert (result.stats[1].proposed, result.stats[1].accepted, result.stats[1].acceptance_rate) == (2, 1, 0.5)


def test_a_draft_catches_up_on_text_it_missed() -> None:
    costs = LatencyModel(CostTable.line(0.0, 0.0, 1.0), CostTable.line(0.0, 0.01, 0.1))
    result = served("fixed-1", [request("a", 0.0, 20, 5)], replace(SMALL, latency=costs))
    # 21 tokens for the first draft, 20 of them in a pass before; then two, since the accepted token is drafted last and
    # was never read.
    assert [step.seconds for step in result.steps] == pytest.approx([1.0, 1.0 + 0.2 + 0.21, 1.0 + 0.1 + 0.02])


def test_batch_expansion_reads_a_context_for_each_token() -> None:
    result = served("fixed-1", [request("a", 0.0, 4, 3)], replace(SMALL, batch_expansion=True))
    assert [step.seconds for step in result.steps] == pytest.approx([1.04, 0.1 + 1.02 + 2 * 0.005])


def test_a_lone_request_takes_what_its_passes_take() -> None:
    (stats,) = served("none", [request("a", 3.0, 10, 40)]).stats
    contexts = sum(range(11, 50))
    assert stats.total_s == pytest.approx(40 * 1.0 + 0.01 * (10 + 39) + 1e-3 * contexts)


def workload(count: int = 60, rate: float = 20.0, **settings: float) -> list[SimulatedRequest]:
    lengths = {"prompt_tokens": 60, "prompt_spread": 0.5, "output_tokens": 30, "output_spread": 0.5}
    return make_workload(WorkloadConfig(requests=count, **{**lengths, **settings}), rate, seed=3)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_request_is_answered_once_and_whole(policy: str) -> None:
    requests = workload(token_spread=0.2)
    simulation = Simulation(requests, make_policy(policy, FAST.latency, requests), FAST)
    emitted, before = 0, 0.0
    while simulation.has_work:
        result = simulation.step()
        assert result is not None
        emitted += sum(row.emitted for row in result.rows)
        assert simulation.now > before
        before = simulation.now
        simulation.sequences.check_integrity()
    assert emitted == sum(r.output_tokens for r in requests)
    for sequence, asked in zip(simulation.arrived, requests, strict=True):
        stats = sequence.stats
        assert sequence.output_length == asked.output_tokens
        assert stats.first_token_s is not None
        assert stats.finished_s is not None
        assert asked.arrival_s <= stats.first_token_s <= stats.finished_s


def test_the_same_seed_gives_the_same_run() -> None:
    noisy = replace(FAST, noise=0.1)
    one, same, other = (served("goodput", workload(), noisy, seed) for seed in (5, 5, 6))
    assert one.steps == same.steps
    assert one.stats == same.stats
    assert one.steps != other.steps


@pytest.mark.parametrize("policy", ["none", "fixed-3", "goodput"])
def test_a_full_cache_preempts_and_is_never_overdrawn(policy: str) -> None:
    tight = replace(FAST, cache_tokens=700)
    result = served(policy, workload(rate=200.0), tight)
    assert max(step.reserved_tokens for step in result.steps) <= 700
    assert sum(stats.preemptions for stats in result.stats) > 0
    assert all(stats.finished_s is not None for stats in result.stats)
    plenty = served(policy, workload(rate=200.0), FAST)
    assert sum(stats.preemptions for stats in plenty.stats) == 0
    assert figures_of(policy, 200.0, plenty).mean_latency_s < figures_of(policy, 200.0, result).mean_latency_s


@pytest.mark.parametrize("rate", [2.0, 40.0])
def test_nobody_beats_the_oracle(rate: float) -> None:
    requests = workload(count=40 if rate < 10 else 100, rate=rate)
    latency = {
        name: figures_of(name, rate, served(name, requests, FAST)).mean_latency_s for name in ("oracle", *POLICIES[:5])
    }
    assert min(latency, key=latency.__getitem__) == "oracle", latency
    assert latency["oracle"] < 0.8 * latency["none"]


def test_impossible_workloads_are_refused_in_a_line() -> None:
    with pytest.raises(ConfigError, match="workload is empty"):
        served("none", [])
    with pytest.raises(ConfigError, match="order of arrival"):
        served("none", [request("a", 1.0, 4, 3), request("b", 0.5, 2, 2)])
    with pytest.raises(ConfigError, match=r"request big: 150 \+ 60 tokens do not fit 200"):
        served("none", [request("big", 0.0, 150, 60)])
