"""Measure what selecting among several drafts takes of the host, by rows and drafts.

    python benchmarks/selection.py

Views of a batch that decodes are planned and observed with goodput alone, and with a selection around it. Rows stay for
64 steps of two tokens, then others come.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from random import Random

from common import Others, write_result

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.named import with_selection

NAMES = ("a", "b", "c", "d")
COSTS = LatencyModel(
    CostTable.line(1e-7, 3e-4, 1.2e-2),
    CostTable.line(1e-8, 5e-5, 1e-3),
    members={name: CostTable.line(1e-8, 5e-5, 1e-3 * (1 + place)) for place, name in enumerate(NAMES)},
)
STAY = 64  # steps of an answer
LENGTH = 4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    others, found = Others(), {}
    for rows in (1, 8, 64):
        sides: dict[str, Callable[[], LengthController]] = {
            "none": lambda: GoodputController(LENGTH, COSTS),
            **{name: _selecting(name) for name in ("goodput", "lbss", "random")},
        }
        seconds = {name: _host_s(make(), rows, options.steps, alone=name == "none") for name, make in sides.items()}
        found[str(rows)] = {
            "ms": {name: 1e3 * own for name, own in seconds.items()},
            "added_ms": {name: 1e3 * (own - seconds["none"]) for name, own in seconds.items() if name != "none"},
        }
    write_result(
        "selection", {"drafts": len(NAMES), "steps": options.steps, "rows": found, "others_cores": others.cores()}
    )
    return 0


def _selecting(name: str) -> Callable[[], LengthController]:
    return lambda: with_selection(GoodputController(LENGTH, COSTS), name, NAMES)


def _host_s(controller: LengthController, rows: int, steps: int, *, alone: bool) -> float:
    """Return the median seconds of planning and observing a step."""
    chance, taken = Random(0), []
    for step in range(steps):
        view = BatchView(tuple([_row(number, step, alone) for number in range(rows)]))
        started = time.perf_counter()
        plan = controller.plan(view)
        planned_s = time.perf_counter() - started
        results = []
        for row, own in zip(view.rows, plan.rows, strict=True):
            length = own.speculation_length
            source = own.trees[0].source if own.trees else "a"
            accepted = sum(chance.random() < 0.6 for _ in range(length))
            results.append(RowResult.chain(row.sequence_id, length, accepted, accepted + 1, source))
        drafted_s = {} if alone else dict.fromkeys(NAMES, 2e-3)
        result = StepResult(tuple(results), view, plan, 0, 8e-3, 2e-2, 2.8e-2, 0, drafted_s)
        started = time.perf_counter()
        controller.observe(result)
        taken.append(planned_s + time.perf_counter() - started)
    return statistics.median(taken[steps // 4 :])


def _row(number: int, step: int, alone: bool) -> RowView:
    answer, place = divmod(step + number, STAY)
    name = f"{number}-{answer}/0"
    prompt = tuple(range(number, number + 50))
    options = [Option(LENGTH, source=source, unread_tokens=1) for source in NAMES]
    first = Option(LENGTH) if alone else options[0]
    others = () if alone else tuple(options[1:])
    return RowView(name, 50 + 2 * place, *first, others=others, domain=("x", "y")[number % 2], prompt=prompt)


if __name__ == "__main__":
    sys.exit(main())
