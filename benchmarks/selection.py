"""Microseconds that selecting among several drafts adds to a step, by rows, and their share of the step.

    python benchmarks/selection.py [--profile PROFILE] [--trees]

A batch decodes with lengths by goodput and one draft, and with a selection among four around it. Processor time of the
one thread, with cold caches (`decisions.py`): means over blocks of 64 steps, since `goodput` reviews drafts every 16.
Rows stay for 64 steps of two tokens, then others come, by turns of two domains. Two drafts are the best of one domain
each, so that there is something to choose. Steps take what a cost table says: an invented one, and that of `distill
profile drafts=[…]`, else the measured one of `results/fidelity_profile.json`, with drafts of one to four times its
costs. Writes `results/selection.json`. With `--trees` lengths grow trees, as in an engine by default, `goodput` prices
drafts by them, and the result is `results/selection_trees.json`. The exit code is 1 if a goal is missed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from random import Random

from common import Others, write_result
from decisions import measured_costs, planned_s, time_step, typical_us

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.candidates import candidates
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.by_name import with_selection

NONE, SELECTIONS = "none", ("goodput", "lbss", "epsilon_greedy", "random")
GOALS = {"goodput": 0.01, "lbss": 0.01}  # share of a step, with the most rows
INVENTED = LatencyModel(CostTable.line(1e-7, 3e-4, 1.2e-2), CostTable.line(1e-8, 5e-5, 1e-3))
DOMAINS = ("x", "y")
BEST, USUAL = 0.75, 0.5  # P(a token is accepted) of a domain's best draft, and of others
DRAFTS = 4
STAY = 64  # steps of an answer
LENGTH = 4
WIDTHS, NODES = (3,) * LENGTH, 32  # of trees, the engine's default


def main() -> int:
    options = read_options()
    others = Others()
    title, measured = measured_costs(options.profile)
    by_costs = {
        name: {str(rows): by_selection(several(costs), rows, options.steps, options.trees) for rows in options.rows}
        for name, costs in (("invented", INVENTED), ("measured", measured))
    }
    largest = str(max(options.rows))
    met = {
        name: {costs: timings[largest][name]["share_of_step"] <= goal for costs, timings in by_costs.items()}
        for name, goal in GOALS.items()
    }
    settings = {"drafts": DRAFTS, "steps": options.steps, "trees": options.trees, "measured": title}
    result = {**settings, "costs": by_costs, "judged_rows": int(largest)}
    name = "selection_trees" if options.trees else "selection"
    write_result(name, {**result, "goals": GOALS, "met": met, "others_cores": others.cores()})
    return 0 if all(all(of_selection.values()) for of_selection in met.values()) else 1


def several(costs: LatencyModel) -> LatencyModel:
    """Return the same costs with several drafts, of one to four times the cost where only one was measured."""
    if len(costs.members) >= DRAFTS:
        return costs
    assert costs.draft is not None
    members = {chr(ord("a") + index): costs.draft.scaled(1 + index) for index in range(DRAFTS)}
    return LatencyModel(costs.target, costs.draft, members=members)


def by_selection(costs: LatencyModel, rows: int, steps: int, trees: bool) -> dict[str, dict[str, float]]:
    """Return the time of each selection's steps, and that of one draft without any."""
    names = list(costs.members)[:DRAFTS]
    lengths = partial(GoodputController, LENGTH, costs, trees=candidates(WIDTHS, NODES) if trees else None)
    timings = {NONE: time_steps(lengths(), costs, (DRAFT,), rows, steps)}
    for name in SELECTIONS:
        timing = time_steps(with_selection(lengths(), name, names), costs, names, rows, steps)
        added_us = timing["us"] - timings[NONE]["us"]
        timings[name] = {**timing, "added_us": added_us, "share_of_step": added_us / timing["step_us"]}
    return timings


def time_steps(
    controller: LengthController, costs: LatencyModel, names: Sequence[str], rows: int, steps: int
) -> dict[str, float]:
    """Return the microseconds of planning and observing a step, and those of the step itself."""
    draws = Random(0)
    host_ns = list[int]()
    steps_s = list[float]()

    def run(view: BatchView, plan: Plan) -> StepResult:
        rows_and_plans = zip(view.rows, plan.rows, strict=True)
        results = tuple([verified(row, planned, names, draws) for row, planned in rows_and_plans])
        drafted_s, target_s = planned_s(costs, view, plan)
        draft_s = sum(drafted_s.values())
        each_s = drafted_s if len(names) > 1 else {}
        return StepResult(results, view, plan, 0, draft_s, target_s, draft_s + target_s, drafted_s=each_s)

    for step in range(steps):
        view = BatchView(tuple([seen(number, step, names) for number in range(rows)]))
        planned, observed, result = time_step(controller, view, partial(run, view))
        host_ns.append(planned + observed)
        steps_s.append(result.total_s)
    return {"us": typical_us(host_ns), "step_us": 1e6 * statistics.mean(steps_s[steps // 2 :])}


def seen(number: int, step: int, names: Sequence[str]) -> RowView:
    """Return a row of a step, with all drafts: its answer ends after `STAY` steps."""
    answer, steps_of_answer = divmod(step + number, STAY)
    prompt = tuple(range(number, number + 50))
    first, *others = [Option(LENGTH, source=name, unread_tokens=1, wide=True) for name in names]
    domain = DOMAINS[(number + answer) % 2]
    tokens = 50 + 2 * steps_of_answer
    return RowView(f"{number}-{answer}/0", tokens, *first, others=tuple(others), domain=domain, prompt=prompt)


def verified(row: RowView, plan: RowPlan, names: Sequence[str], draws: Random) -> RowResult:
    """Return the result of a row: the first two drafts are the best of one domain each."""
    length, source = plan.speculation_length, plan.trees[0].source if plan.trees else names[0]
    best = names.index(source) == DOMAINS.index(row.domain)
    accepted = 0
    while accepted < length and draws.random() < (BEST if best else USUAL):
        accepted += 1
    return RowResult.chain(row.sequence_id, length, accepted, accepted + 1, source, row.domain)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=512)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--trees", action="store_true", help="lengths grow trees, not chains alone")
    parser.add_argument("--profile", type=Path, help="a profile of this machine, by distill profile drafts=[…]")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
