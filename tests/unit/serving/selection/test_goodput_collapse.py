"""Selection by goodput where the chosen draft collapses: a sound one that was not chosen is tried at once.

The engine's own loop, lengths and trees are simulated, at a batch where a drafted token hardly pays too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest

from distillspec.config.simulation import WorkloadConfig
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.losses import share_lost
from distillspec.serving.selection.selecting import selecting
from distillspec.serving.simulation import Hardware, SimulatedRequest, Simulation, make_policy, make_workload

SMALL = CostTable.line(1e-8, 1e-4, 2e-3)
COSTS = LatencyModel(CostTable.line(1e-7, 1e-3, 2e-2), SMALL)
BEFORE, WITHIN, AFTER = 90, 30, 50  # requests until the collapse, in which it is to be left, and after them
COLLAPSED = 0.01


def load(seed: int, requests: int = BEFORE + WITHIN + AFTER, **alphas: float) -> list[SimulatedRequest]:
    lengths = {"prompt_tokens": 12.0, "output_tokens": 48.0, "output_spread": 0.3}
    config = WorkloadConfig(requests=requests, **lengths, sibling_alpha=0.05, alphas={"x": alphas})
    return make_workload(config, 1000.0, seed)


def collapsing(seed: int, **others: float) -> list[SimulatedRequest]:
    """Return requests of which the first ones find draft a sound."""
    return [*load(seed, a=0.9, **others)[:BEFORE], *load(seed, a=COLLAPSED, **others)[BEFORE:]]


def simulated(asked: Sequence[SimulatedRequest], slots: int) -> Simulation:
    costs = replace(COSTS, members=dict.fromkeys(asked[0].traces, SMALL))
    policy = make_policy("goodput", costs, asked, selection="goodput")
    return Simulation(asked, policy, Hardware(costs, cache_tokens=100_000, slots=slots, max_len=512))


def tried(run: Simulation) -> list[Counter[str]]:
    """Return the tokens of each draft that were tried for each request."""
    found = [Counter[str]() for _ in run.requests]
    while run.has_work:
        result = run.step()
        for row in () if result is None else result.rows:
            number = int(row.sequence_id.split("/")[0].removeprefix("r"))
            found[number].update([trial.source for trial in row.trials])
    return found


def mostly(found: Sequence[Counter[str]], source: str) -> float:
    """Return the share of these requests for which a draft drafted most."""
    return sum(bool(own) and max(own, key=lambda name: own[name]) == source for own in found) / len(found)


@pytest.mark.parametrize("slots", [1, 4, 16])
@pytest.mark.parametrize("seed", range(3))
def test_a_sound_draft_that_was_not_chosen_is_tried_and_found(slots: int, seed: int) -> None:
    found = tried(simulated(collapsing(seed, b=0.7), slots))
    assert mostly(found[BEFORE - 20 - slots : BEFORE - slots], "a") > 0.8
    assert any(own["b"] for own in found[BEFORE : BEFORE + WITHIN])
    assert mostly(found[BEFORE + WITHIN :], "b") > 0.8


@pytest.mark.parametrize("slots", [1, 16])
def test_the_sound_one_is_found_among_others(slots: int) -> None:
    found = tried(simulated(collapsing(3, b=0.1, c=0.7), slots))
    assert mostly(found[BEFORE + WITHIN :], "c") > 0.8


@pytest.mark.parametrize("slots", [1, 16])
def test_where_no_other_is_sound_trials_are_few(slots: int) -> None:
    found = tried(simulated(collapsing(4, b=0.02), slots))
    late = found[BEFORE + WITHIN :]
    assert sum(sum(own.values()) for own in late) < 4 * len(late)


@pytest.mark.parametrize("slots", [1, 4])
def test_trials_cost_little_where_nothing_collapses(slots: int) -> None:
    run = simulated(load(5, 300, a=0.75, b=0.6, c=0.3), slots)
    tried(run)
    chosen = selecting(run.policy.controller)
    assert chosen is not None
    assert chosen.figures.losses.trials is not None
    assert share_lost(chosen.figures.losses.trials, sum(request.output_tokens for request in run.requests)) < 0.03
