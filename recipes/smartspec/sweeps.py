"""Policies against rates on one simulated machine: what all latency figures are made of."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from distillspec.config import WorkloadConfig
from distillspec.serving.simulation import (
    Hardware,
    Policy,
    SimulatedRequest,
    Simulation,
    make_policy,
    make_workload,
)
from distillspec.serving.simulation.figures import RunFigures, figures_of

SECONDS, FEWEST, MOST = 20.0, 40, 240  # arrivals a run lasts for, and requests it has at least and at most
MakePolicy = Callable[[Hardware, Seq[SimulatedRequest]], Policy]


@dataclass(frozen=True)
class Sweep:
    """One picture's runs: every policy at every rate."""

    title: str
    hardware: Hardware
    workload: WorkloadConfig
    rates: tuple[float, ...]
    policies: tuple[str, ...]
    longest: int = 5
    others: tuple[tuple[str, MakePolicy], ...] = ()  # policies that have no name


def run_sweep(sweep: Sweep, scale: float = 1.0, seed: int = 0) -> list[RunFigures]:
    """All runs, rate by rate; every policy meets the same requests with the same luck."""
    runs = []
    for rate in sweep.rates:
        count = max(4, round(scale * min(max(SECONDS * rate, FEWEST), MOST)))
        requests = make_workload(_with_requests(sweep.workload, count), rate, seed)
        policies = [
            make_policy(name, sweep.hardware.latency, requests, longest=sweep.longest, seed=seed)
            for name in sweep.policies
        ]
        policies += [make(sweep.hardware, requests) for _, make in sweep.others]
        names = [*sweep.policies, *(name for name, _ in sweep.others)]
        for name, policy in zip(names, policies, strict=True):
            runs.append(figures_of(name, rate, Simulation(requests, policy, sweep.hardware, seed).run()))
    return runs


def latencies(runs: Seq[RunFigures], rate: float) -> dict[str, float]:
    """Mean latency by policy at one rate, seconds."""
    return {run.policy: run.mean_latency_s for run in runs if run.rate == rate}


def worst_against_best(runs: Seq[RunFigures], ours: str, baselines: Seq[str]) -> float:
    """Over all rates the largest of our mean latency / the best baseline's."""
    found = [latencies(runs, rate) for rate in {run.rate for run in runs} if rate is not None]
    return max(at[ours] / min(at[name] for name in baselines) for at in found)


def _with_requests(workload: WorkloadConfig, count: int) -> WorkloadConfig:
    return WorkloadConfig(**{**vars(workload), "requests": count})
