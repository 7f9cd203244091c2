"""Simulated requests a second of processor time on one core, by policy and load.

    python benchmarks/simulator.py

128 tokens in, 128 out, α 0.7, on `hardware=a100-7b`. The time is the thread's own (other work on the machine does not
count, though it slows caches and cores), the median of `--rounds`. What is spent in `plan` and `observe` is measured in
runs of its own, and what the simulator alone would reach is given beside it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

from common import write_result

from distillspec.config import WorkloadConfig
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.wrapped import WrappedController
from distillspec.serving.simulation import Policy, Simulation, load_hardware, make_policy, make_workload
from distillspec.serving.simulation.figures import figures_of

LOADS = ((0.1, 40), (4.0, 150), (16.0, 300), (40.0, 1000))  # arrivals a second, requests
POLICIES = ("none", "fixed-3", "goodput", "goodput-step", "oracle")
GOALS = {"every load": 200, "large batches": 1000}


class Timed(WrappedController):
    """A controller, and the processor seconds spent in it."""

    def __init__(self, inside: LengthController) -> None:
        super().__init__(inside)
        self.spent_s = 0.0

    def plan(self, view: BatchView) -> Plan:
        began = time.thread_time()
        plan = super().plan(view)
        self.spent_s += time.thread_time() - began
        return plan

    def observe(self, result: StepResult) -> None:
        began = time.thread_time()
        super().observe(result)
        self.spent_s += time.thread_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    by_policy = {
        policy: {f"{rate:g}": measure(policy, rate, count, options.rounds) for rate, count in LOADS}
        for policy in POLICIES
    }
    slowest = {
        policy: min(figures["requests_per_s"] for figures in loads.values()) for policy, loads in by_policy.items()
    }
    write_result("simulator", {"policies": by_policy, "slowest_load": slowest, "goals": GOALS})


def measure(name: str, rate: float, count: int, rounds: int) -> dict[str, Any]:
    """Medians over `rounds` of the same simulation."""
    hardware = load_hardware("a100-7b")
    requests = make_workload(WorkloadConfig(requests=count), rate)
    whole_s = []
    controller_seconds = []
    batch = 0.0
    steps = 0
    for _ in range(rounds):
        simulation = Simulation(requests, make_policy(name, hardware.latency, requests), hardware)
        began = time.thread_time()
        result = simulation.run()
        whole_s.append(time.thread_time() - began)
        controller = Timed(make_policy(name, hardware.latency, requests).controller)
        Simulation(requests, Policy(name, controller), hardware).run()
        controller_seconds.append(controller.spent_s)
        batch, steps = figures_of(name, rate, result).mean_batch, len(result.steps)
    total_s, controller_s = statistics.median(whole_s), statistics.median(controller_seconds)
    return {
        "requests_per_s": round(count / total_s, 1),
        "requests_per_s_without_controller": round(count / (total_s - controller_s), 1),
        "controller_share": round(controller_s / total_s, 3),
        "controller_us_per_step": round(1e6 * controller_s / steps, 1),
        "us_per_step": round(1e6 * total_s / steps, 1),
        "mean_batch": round(batch, 1),
    }


if __name__ == "__main__":
    main()
