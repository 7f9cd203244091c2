"""Microseconds that controllers take a step (plan and observe), by rows. Writes `results/controller.json`.

    python benchmarks/controller.py

Processor time of the one thread, so that a busy machine counts little. (The process's own clock sums over all threads,
which took 20 to 90 µs a look beside torch's.) Medians over blocks of 16 steps: what is done every 16th counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy
from common import write_result

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.baselines.smartspec import SmartSpecController
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

LONGEST, ALPHA, BLOCK = 6, 0.7, 16
CPU = LatencyModel(CostTable.line(1e-6, 1.5e-3, 4e-2), CostTable.line(1e-7, 2e-4, 5e-3))
GOALS = {"64": 200.0, "1": 60.0}  # µs a step with controller=goodput


def main() -> None:
    options = _options()
    controllers: dict[str, Callable[[], LengthController]] = {
        "goodput": lambda: GoodputController(LONGEST, CPU),
        "goodput, one length a step": lambda: GoodputController(LONGEST, CPU, lengths="step"),
        "goodput, bounds": lambda: GoodputController(LONGEST, CPU, max_time_per_token_s=0.03),
        "smartspec": lambda: SmartSpecController(LONGEST, CPU),
    }
    found = {
        name: {str(rows): _time(make(), rows, options.steps) for rows in (1, 4, 16, 64)}
        for name, make in controllers.items()
    }
    met = {rows: found["goodput"][rows]["total_us"] <= goal for rows, goal in GOALS.items()}
    write_result("controller", {"longest": LONGEST, "by_rows": found, "goals_us": GOALS, "met": met})


def _time(controller: LengthController, rows: int, steps: int) -> dict[str, Any]:
    """Of steps with known acceptance and costs."""
    generator = numpy.random.default_rng(0)
    planned, observed = [], []
    for step in range(steps):
        contexts = [100 + (step + 37 * row) % 400 for row in range(rows)]
        view = BatchView(tuple([RowView(f"r{row}", context, 8) for row, context in enumerate(contexts)]))
        started = time.thread_time_ns()
        plan = controller.plan(view)
        planned.append(time.thread_time_ns() - started)
        lengths = [row.speculation_length for row in plan.rows]
        stood = [int((generator.random(k) < ALPHA).cumprod().sum()) for k in lengths]
        results = tuple([RowResult.chain(f"r{i}", lengths[i], stood[i], stood[i] + 1) for i in range(rows)])
        noise = float(generator.normal(1, 0.03))
        draft_s, target_s = CPU.draft_s(contexts, lengths) * noise, CPU.target_s(contexts, lengths) * noise
        result = StepResult(results, view, plan, 0, draft_s, target_s, draft_s + target_s)
        started = time.thread_time_ns()
        controller.observe(result)
        observed.append(time.thread_time_ns() - started)
    plan_us, observe_us = (_typical_us(times) for times in (planned, observed))
    return {
        "plan_us": round(plan_us, 1),
        "observe_us": round(observe_us, 1),
        "total_us": round(plan_us + observe_us, 1),
    }


def _typical_us(times_ns: list[int]) -> float:
    """Return the median over blocks of their mean µs a step. The first half warms up and is left out."""
    late = times_ns[len(times_ns) // 2 :]
    return statistics.median(statistics.mean(late[i : i + BLOCK]) for i in range(0, len(late), BLOCK)) / 1e3


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
