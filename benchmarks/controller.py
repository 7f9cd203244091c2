"""Microseconds that controllers take a step (plan and observe), by rows, and their share of the step.

    python benchmarks/controller.py [--profile PROFILE]

Processor time of the one thread, so that a busy machine counts little. (The process's own clock sums over all threads,
which took 20 to 90 µs a look beside torch's.) Medians over blocks of 64 steps, since plans hold for up to 32. Between
steps 64 MB are read, as a model's passes read its weights: after them the caches hold nothing of a controller, which
takes half as long again. Steps take what a cost table says: an invented one with which all rows draft, and that of
`distill profile`, else the measured one of `results/fidelity_profile.json`. Rows have a draft, and in the last side
n-grams that name likely nodes beside it. Writes `results/controller.json`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy
from common import write_result
from decisions import measured_costs, planned_s, time_step, typical_us

from distillspec.config.engine import EngineConfig
from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.base.shape import PlannedTree
from distillspec.serving.base.tree import NGRAM
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

LONGEST, ALPHA, ROWS = 6, 0.7, (1, 4, 16, 64)
INVENTED = LatencyModel(CostTable.line(1e-6, 1.5e-3, 4e-2), CostTable.line(1e-7, 2e-4, 5e-3))
GOALS_US = {"64": 200.0, "1": 60.0}  # a step, of chains by goodput with the invented costs
SHARE = 0.01  # of a step of 64 rows, of everything by goodput
NGRAMS = "goodput beside n-grams"
LIKELY = (0.5, 0.3, 0.2, 0.15, 0.1, 0.05)  # chances of a chain's nodes that n-grams name


def main() -> None:
    options = _options()
    title, measured = measured_costs(options.profile)
    by_costs = {
        name: {side: _by_rows(side, costs, options) for side in ("smartspec", *_goodputs())}
        for name, costs in (("invented", INVENTED), ("measured", measured))
    }
    chains = by_costs["invented"]["goodput-chains"]
    largest = str(max(options.rows))
    met = {
        "us": {rows: chains[rows]["total_us"] <= goal for rows, goal in GOALS_US.items() if rows in chains},
        "share": {
            costs: {side: sides[side][largest]["share"] <= SHARE for side in _goodputs()}
            for costs, sides in by_costs.items()
        },
    }
    goals = {"us": GOALS_US, "share": SHARE}
    write_result("controller", {"longest": LONGEST, "measured": title, "costs": by_costs, "goals": goals, "met": met})


def _goodputs() -> tuple[str, ...]:
    return "goodput-chains", "goodput", "goodput-step", "goodput, bounds", NGRAMS


def _by_rows(side: str, costs: LatencyModel, options: argparse.Namespace) -> dict[str, Any]:
    settings = EngineConfig(max_time_per_token_s=0.03 if side == "goodput, bounds" else None)
    name = "goodput" if side in ("goodput, bounds", NGRAMS) else side
    view = _view_with_ngrams if side == NGRAMS else _view
    by_rows = {}
    for rows in options.rows:
        controller = named_controller(name, LONGEST, costs, settings=settings)
        by_rows[str(rows)] = _time(controller, costs, view, rows, options.steps)
    return by_rows


def _time(
    controller: LengthController,
    costs: LatencyModel,
    view_of: Callable[[int, int], BatchView],
    rows: int,
    steps: int,
) -> dict[str, float]:
    """Of steps with known acceptance and costs."""
    generator = numpy.random.default_rng(0)
    planned = []
    observed = []
    seconds = []

    def run(view: BatchView, plan: Plan) -> StepResult:
        results = tuple([_verified(planned_row, generator) for planned_row in plan.rows])
        noise = float(generator.normal(1, 0.03))
        drafted_s, target_s = planned_s(costs, view, plan, free=(NGRAM,))
        draft_s, target_s = noise * sum(drafted_s.values()), noise * target_s
        return StepResult(results, view, plan, 0, draft_s, target_s, draft_s + target_s)

    for step in range(steps):
        view = view_of(rows, step)
        plan_ns, observe_ns, result = time_step(controller, view, partial(run, view))
        planned.append(plan_ns)
        observed.append(observe_ns)
        seconds.append(result.total_s)
    plan_us, observe_us = (typical_us(times) for times in (planned, observed))
    step_us = 1e6 * statistics.median(seconds[len(seconds) // 2 :])
    return {
        "plan_us": round(plan_us, 1),
        "observe_us": round(observe_us, 1),
        "total_us": round(plan_us + observe_us, 1),
        "step_us": round(step_us, 1),
        "share": (plan_us + observe_us) / step_us,
    }


def _view(rows: int, step: int) -> BatchView:
    return BatchView(tuple([RowView(f"r{row}", _context(row, step), 8, wide=True) for row in range(rows)]))


def _view_with_ngrams(rows: int, step: int) -> BatchView:
    """Return rows with a draft. Of some n-grams name nodes too, of other rows and other numbers in each step."""
    chain = LikelyNodes(NGRAM, LIKELY, tuple(range(-1, len(LIKELY) - 1)), tuple(range(1, len(LIKELY) + 1)))
    draft, views = Option(8, wide=True), []
    for row in range(rows):
        option, others = draft, tuple[Option, ...]()
        if count := (step + row) % (len(LIKELY) + 1):
            option, others = Option(8, False, 6, source=NGRAM, wide=True, likely=chain.first(count)), (draft,)
        views.append(RowView(f"r{row}", _context(row, step), *option, others=others))
    return BatchView(tuple(views))


def _context(row: int, step: int) -> int:
    return 100 + (step + 37 * row) % 400


def _verified(planned: RowPlan, generator: numpy.random.Generator) -> RowResult:
    """Return a row's result.

    The first sibling at each node is accepted with `ALPHA`, each further one with `ALPHA` if those before it failed.
    """
    trials: list[Trial] = []
    for tree in planned.trees:  # a later one is tried where nothing of those before it was accepted
        trials += _tried(tree, generator)
        if any(trial.accepted for trial in trials):
            break
    depth, nodes = planned.speculation_length, sum([tree.shape.nodes for tree in planned.trees])
    accepted = sum([trial.accepted for trial in trials])
    return RowResult(planned.sequence_id, depth, nodes, accepted, accepted + 1, tuple(trials))


def _tried(tree: PlannedTree, generator: numpy.random.Generator) -> list[Trial]:
    trials, node = list[Trial](), 0
    for depth, children in enumerate(tree.shape.levels, 1):
        siblings, right = children[node], int(generator.geometric(ALPHA)) - 1
        trials += [Trial(depth, rank, tree.source, rank == right) for rank in range(min(siblings, right + 1))]
        if right >= siblings:
            break
        node = sum(children[:node]) + right
    return trials


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--profile", type=Path, help="a profile of this machine, by distill profile")
    return parser.parse_args()


if __name__ == "__main__":
    main()
