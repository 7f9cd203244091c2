"""Microseconds that controllers take a step (plan and observe), by rows; processor time, so that a busy machine counts
little. Writes `results/controller.json`.

    python benchmarks/controller.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy
from common import write_result

from distillspec.serving.control.base import BatchView, LengthController, RowResult, RowView, StepResult
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.latency import ForwardCost, LatencyModel
from distillspec.serving.control.smartspec import SmartSpecController

LONGEST, ALPHA = 6, 0.7
CPU = LatencyModel(ForwardCost(1e-6, 1.5e-3, 4e-2), ForwardCost(1e-7, 2e-4, 5e-3))
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
    """Medians over steps with known acceptance and costs."""
    generator = numpy.random.default_rng(0)
    planned, observed = [], []
    for step in range(steps):
        contexts = [100 + (step + 37 * row) % 400 for row in range(rows)]
        view = BatchView(tuple([RowView(f"r{row}", context, 8) for row, context in enumerate(contexts)]))
        started = time.process_time_ns()
        plan = controller.plan(view)
        planned.append(time.process_time_ns() - started)
        lengths = [row.length for row in plan.rows]
        stood = [int((generator.random(k) < ALPHA).cumprod().sum()) for k in lengths]
        results = tuple([RowResult(f"r{i}", lengths[i], stood[i], stood[i] + 1) for i in range(rows)])
        noise = float(generator.normal(1, 0.03))
        draft_s, target_s = CPU.draft_s(contexts, lengths) * noise, CPU.target_s(contexts, lengths) * noise
        result = StepResult(results, view, plan, 0, draft_s, target_s, draft_s + target_s)
        started = time.process_time_ns()
        controller.observe(result)
        observed.append(time.process_time_ns() - started)
    plan_us, observe_us = (statistics.median(times) / 1e3 for times in (planned, observed))
    return {
        "plan_us": round(plan_us, 1),
        "observe_us": round(observe_us, 1),
        "total_us": round(plan_us + observe_us, 1),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    return parser.parse_args()


if __name__ == "__main__":
    main()
