"""Sweeps of policies and request rates on one simulated machine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from distillspec.config import EngineConfig, WorkloadConfig
from distillspec.serving.simulation import (
    Hardware,
    Policy,
    SimulatedRequest,
    Simulation,
    make_policy,
    make_workload,
)
from distillspec.serving.simulation.figures import RunFigures, figures_of

SECONDS = 20.0  # of arrivals in a run
FEWEST, MOST = 40, 240  # requests of a run
MakePolicy = Callable[[Hardware, Sequence[SimulatedRequest]], Policy]


@dataclass(frozen=True)
class Sweep:
    """Runs of one figure: every policy at every rate."""

    title: str
    hardware: Hardware
    workload: WorkloadConfig
    rates: tuple[float, ...]
    policies: tuple[str, ...]
    speculation_length: int = 5
    others: tuple[tuple[str, MakePolicy], ...] = ()  # policies that `make_policy` does not know


def run_sweep(sweep: Sweep, scale: float = 1.0, seed: int = 0) -> list[RunFigures]:
    """Run every policy at every rate, on the same requests with the same acceptance traces."""
    runs, chains = [], EngineConfig(tree="off")  # as the paper's
    for rate in sweep.rates:
        count = max(4, round(scale * min(max(SECONDS * rate, FEWEST), MOST)))
        requests = make_workload(_with_requests(sweep.workload, count), rate, seed)
        latency, most = sweep.hardware.latency, sweep.speculation_length
        policies = [
            make_policy(name, latency, requests, speculation_length=most, seed=seed, settings=chains)
            for name in sweep.policies
        ]
        policies += [make(sweep.hardware, requests) for _, make in sweep.others]
        names = [*sweep.policies, *(name for name, _ in sweep.others)]
        for name, policy in zip(names, policies, strict=True):
            runs.append(figures_of(name, rate, Simulation(requests, policy, sweep.hardware, seed).run()))
    return runs


def latencies(runs: Sequence[RunFigures], rate: float) -> dict[str, float]:
    """Return the mean latency by policy at one rate, in seconds."""
    return {run.policy: run.mean_latency_s for run in runs if run.rate == rate}


def worst_against_best(runs: Sequence[RunFigures], ours: str, baselines: Sequence[str]) -> float:
    """Return the largest ratio, over all rates, of our mean latency to the best baseline's."""
    at_rates = [latencies(runs, rate) for rate in {run.rate for run in runs} if rate is not None]
    return max(latency[ours] / min(latency[name] for name in baselines) for latency in at_rates)


def _with_requests(workload: WorkloadConfig, count: int) -> WorkloadConfig:
    return WorkloadConfig(**{**vars(workload), "requests": count})
