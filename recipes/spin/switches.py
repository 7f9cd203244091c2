"""Steps in which a row comes to another draft: that draft has read the row's text ahead, or it reads it in the step.

Three drafts are simulated, two small ones that are good at unlike texts and a larger one. Prompts are long, callers
name all requests alike, and requests differ, so that rows find out by their own trials which draft suits them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy

from distillspec.config.simulation import WorkloadConfig
from distillspec.recipes.spin.runs import rate
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.simulation import (
    Hardware,
    SimulatedRequest,
    Simulation,
    make_policy,
    make_workload,
)

SMALL, LARGE = CostTable.line(1e-8, 5e-5, 1e-3), CostTable.line(1e-8, 1e-4, 4e-3)
COSTS = LatencyModel(CostTable.line(1e-7, 4e-4, 2e-2), SMALL, members={"a": SMALL, "b": SMALL, "large": LARGE})
MACHINE = Hardware(COSTS, cache_tokens=100_000, slots=4, max_len=2048)
LOAD = WorkloadConfig(
    requests=20,
    prompt_tokens=900,
    output_tokens=160,
    request_spread=0.2,
    alphas={"maths": {"a": 0.75, "b": 0.3, "large": 0.6}, "sql": {"a": 0.3, "b": 0.75, "large": 0.6}},
)
LENGTH = "fixed-2"  # lengths by no rule, so that steps differ by their drafts alone
SIDES = {"ahead": True, "at_once": False}  # whether drafts read ahead of switches
SWITCHING = ("goodput", "lbss")  # selections that let them
KINDS = ("switching", "reading", "usual")  # of steps


class StepSeconds(NamedTuple):
    """Seconds of a run's steps, by kind. Steps that read prompts or have a new answer are left out."""

    switching: list[float]  # a row has come to another draft
    reading: list[float]  # of the others, those in which drafts read ahead
    usual: list[float]
    tokens_per_s: float  # of the whole run


@dataclass(frozen=True)
class Switches:
    """Settings of the simulation: `runs` loads are drawn."""

    runs: int = 60

    def run(self) -> dict[str, Any]:
        """Return quantiles of steps for each selection, with reading ahead and without."""
        return {
            chosen: {side: _figures(chosen, ahead, self.runs) for side, ahead in SIDES.items()} for chosen in SWITCHING
        }


def drawn(load: WorkloadConfig, seed: int) -> list[SimulatedRequest]:
    """Return a load of requests that callers name alike."""
    return [replace(request, domain="text") for request in make_workload(load, 100.0, seed)]


def step_seconds(requests: Sequence[SimulatedRequest], selection: str, ahead: bool) -> StepSeconds:
    """Return the seconds of the steps of a run on `MACHINE`.

    Args:
        ahead: drafts read ahead of switches.
    """
    policy = make_policy(LENGTH, COSTS, requests, selection=selection, selection_options={"fast_switching": ahead})
    simulation, kinds = Simulation(requests, policy, MACHINE), StepSeconds([], [], [], 0.0)
    drafts: dict[str, str] = {}  # of all rows so far
    while simulation.has_work:
        result = simulation.step()
        if result is None or result.plan.chosen is None or result.prefill_tokens:
            continue
        chosen = {row: draft for row, draft in result.plan.chosen.items() if draft is not None}  # else none can draft
        if all(row in drafts for row in chosen):
            switches = any(drafts[row] != draft for row, draft in chosen.items())
            kind = kinds.switching if switches else kinds.reading if result.readings_s else kinds.usual
            kind.append(result.total_s)
        drafts.update(chosen)
    return kinds._replace(tokens_per_s=rate(simulation.result))


def _figures(selection: str, ahead: bool, runs: int) -> dict[str, Any]:
    """Return quantiles of the steps of each kind, in usual steps of the median, and tokens a second."""
    by_run = [step_seconds(drawn(LOAD, seed), selection, ahead) for seed in range(runs)]
    usual_s = float(numpy.median([seconds for run in by_run for seconds in run.usual]))
    kinds = {kind: [seconds / usual_s for run in by_run for seconds in getattr(run, kind)] for kind in KINDS}
    rates = [run.tokens_per_s for run in by_run]
    return {**{kind: _quantiles(steps) for kind, steps in kinds.items()}, "tokens_per_s": float(numpy.mean(rates))}


def _quantiles(steps: Sequence[float]) -> dict[str, float]:
    """Return their number, and what half, 99 in 100 and all of them take at most."""
    p50, p99, most = numpy.quantile(steps, [0.5, 0.99, 1.0]).tolist() if steps else (0.0, 0.0, 0.0)
    return {"steps": len(steps), "p50": p50, "p99": p99, "most": most}
