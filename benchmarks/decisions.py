"""Time of a controller's decisions, and the seconds of the steps that it decides on, by a table of costs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import numpy
from common import RESULTS

from distillspec.files import read_object
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.costs.hardware_profile import Profile
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

WEIGHTS = numpy.ones(8 * 2**20)  # read between steps
BLOCK = 64  # steps over which times are averaged, since plans hold for up to 32


def time_step(
    controller: LengthController, view: BatchView, run: Callable[[Plan], StepResult]
) -> tuple[int, int, StepResult]:
    """Plan and observe a step. Return the nanoseconds of this thread that each took, and the step.

    Before each, 64 MB are read, as a model's passes read its weights: after them the caches hold nothing of a
    controller.
    """
    WEIGHTS.sum()
    started = time.thread_time_ns()
    plan = controller.plan(view)
    planned = time.thread_time_ns() - started
    result = run(plan)
    WEIGHTS.sum()
    started = time.thread_time_ns()
    controller.observe(result)
    return planned, time.thread_time_ns() - started, result


def typical_us(times_ns: Sequence[int]) -> float:
    """Return the median over blocks of their mean µs a step. The first half warms up and is left out."""
    late = times_ns[len(times_ns) // 2 :]
    return statistics.median(statistics.mean(late[i : i + BLOCK]) for i in range(0, len(late), BLOCK)) / 1e3


def planned_s(
    costs: LatencyModel, view: BatchView, plan: Plan, free: Collection[str] = ()
) -> tuple[dict[str, float], float]:
    """Return the seconds of each draft's passes in a planned step, and of the target's pass.

    Args:
        free: sources whose passes cost nothing.
    """
    contexts = [row.context_tokens for row in view.rows]
    work: dict[str, list[tuple[int, Sequence[int]]]] = {}
    for context, planned in zip(contexts, plan.rows, strict=True):
        for tree in planned.trees:
            if tree.source not in free:
                work.setdefault(tree.source, []).append((context, tree.shape.reads))
    drafted_s = {source: costs.of_draft(source, drafts_block=False).trees_s(reads) for source, reads in work.items()}
    nodes = [sum([tree.shape.nodes for tree in planned.trees]) for planned in plan.rows]
    return drafted_s, costs.target_s(contexts, nodes)


def measured_costs(profile: Path | None) -> tuple[str, LatencyModel]:
    """Return measured costs of steps, and the machine that they are of. None: those of `fidelity_profile.json`."""
    if profile is not None:
        measured = Profile.read(profile)
        return measured.title, measured.latency
    record = read_object(RESULTS / "fidelity_profile.json")
    drafting = next(iter(record["drafts"].values()))
    target, draft = (CostTable.from_json(part["cost"]) for part in (record["target_cost"], drafting["cost"]))
    return f"{record['machine']['cpu']}, fidelity_profile.json", LatencyModel(target, draft)
