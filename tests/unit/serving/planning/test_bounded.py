"""Bounds on the time per token: against brute force, where they can be kept and where not."""

from __future__ import annotations

from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import RequestRefused
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.bounded import best_within
from distillspec.serving.simulation.hardware import loaded_experts

from ..conftest import MakeEngine, hf_greedy, prompts
from ..machine import CPU, Machine

HAZARDS = st.lists(st.floats(0, 1), min_size=3, max_size=3)
ROWS = st.lists(st.tuples(HAZARDS, st.integers(0, 3), st.integers(0, 50), st.floats(0.1, 8)), min_size=1, max_size=3)


def mixture(per_context: float, per_token: float, fixed: float, per_expert: float) -> CostTable:
    """Costs of a target with eight experts, two a token."""
    costs = ((float(n), fixed + per_token * n + per_expert * loaded_experts(8, 2, n)) for n in range(1, 13))
    return CostTable.rising(costs, per_context)


def every(batch: ChainBatch) -> numpy.ndarray:
    """All lengths of all rows `[m, n]`."""
    return numpy.array([*product(*(range(limit + 1) for limit in batch.limits))])


def worst(batch: ChainBatch, lengths: numpy.ndarray, bounds: numpy.ndarray) -> numpy.ndarray:
    """The worst row's expected time per token over its bound, by definition, for lengths `[m, n]`."""
    emitted = [[1 + sum(s[:k]) for s, k in zip(batch.survival, own, strict=True)] for own in lengths.tolist()]
    taken = [one.seconds for one in batch.expected(lengths)]
    found: numpy.ndarray = (numpy.array(taken)[:, None] / numpy.array(emitted) / bounds).max(1)
    return found


def rates(batch: ChainBatch, lengths: numpy.ndarray) -> numpy.ndarray:
    return numpy.array([one.goodput for one in batch.expected(lengths)])


def within(batch: ChainBatch, bounds: numpy.ndarray, *, alike: bool = False) -> tuple[numpy.ndarray, float]:
    """The best lengths within bounds `[1, n]`, where those without bounds are the best ones of all."""
    free = batch.alike if alike else every(batch)
    found, excess = best_within(batch, bounds, free[rates(batch, free).argmax()], alike=alike)
    return found[None], excess


@settings(max_examples=150, deadline=None)
@given(ROWS, st.floats(0, 0.5), st.floats(0, 2), st.booleans(), st.just(0.0) | st.floats(0, 1))
def test_the_best_within_bounds_is_brute_forces(
    rows: list[tuple[list[float], int, int, float]], per_token: float, fixed: float, bounded: bool, per_expert: float
) -> None:
    # A further token costs the same in every row, so that the optimum is exact, experts or not.
    target = mixture(0.01, per_token, 0.1 + fixed, per_expert)
    latency = LatencyModel(target, CostTable.line(0, per_token / 4, fixed / 3))
    survival = numpy.cumprod(numpy.array([hazards for hazards, _, _, _ in rows]), 1)
    limits = numpy.array([limit for _, limit, _, _ in rows])
    contexts = numpy.array([context for _, _, context, _ in rows])
    bounds = numpy.array([bound if bounded or i else numpy.inf for i, (_, _, _, bound) in enumerate(rows)])
    batch = ChainBatch(survival, limits, contexts, latency)
    for alike, choices in ((False, every(batch)), (True, batch.alike)):
        found, excess = within(batch, bounds, alike=alike)
        assert excess == pytest.approx(worst(batch, found, bounds)[0])
        assert (found <= limits).all()
        excesses = worst(batch, choices, bounds)
        if (kept := excesses <= 1).any():
            assert excess <= 1 + 1e-9
            assert rates(batch, found)[0] == pytest.approx(rates(batch, choices[kept]).max())
        else:
            assert excess == pytest.approx(excesses.min())


def test_bounds_hold_where_tokens_cost_differently_too() -> None:
    generator, kept = numpy.random.default_rng(0), 0
    for _ in range(60):
        latency = LatencyModel(CostTable.line(1e-4, 0.02, 0.3), CostTable.line(1e-4, 0.01, 0.05))
        survival, contexts = generator.random((4, 4)).cumprod(1), generator.integers(0, 400, 4)
        batch = ChainBatch(survival, numpy.full(4, 4), contexts, latency)
        bounds, all_lengths = generator.uniform(0.4, 1.0, 4), every(batch)
        found, _ = within(batch, bounds)
        if (worst(batch, batch.alike, bounds) <= 1).any():
            assert worst(batch, found, bounds)[0] <= 1 + 1e-9
            free = all_lengths[[rates(batch, all_lengths).argmax()]]
            kept += int(worst(batch, free, bounds)[0] > 1)
    assert kept > 5, "bounds that can be kept, and that the best lengths without bounds break"


def test_little_is_lost_where_tokens_cost_differently() -> None:
    generator, kept = numpy.random.default_rng(0), []
    for trial in range(200):
        latency = LatencyModel(mixture(1e-4, 0.02, 0.3, 0.05 * (trial % 2)), CostTable.line(1e-3, 0.01, 0.05))
        survival, contexts = generator.random((3, 3)).cumprod(1), generator.integers(0, 400, 3)
        batch = ChainBatch(survival, numpy.full(3, 3), contexts, latency)
        bounds, lengths = generator.uniform(0.4, 1.2, 3), every(batch)
        if (fits := worst(batch, lengths, bounds) <= 1).any():
            found, excess = within(batch, bounds)
            assert excess <= 1 + 1e-9
            assert worst(batch, found, bounds)[0] <= 1 + 1e-9
            kept.append(rates(batch, found)[0] / rates(batch, lengths[fits]).max())
    assert len(kept) > 50
    assert min(kept) > 0.98


def test_the_controller_keeps_bounds_and_says_when_it_cannot() -> None:
    rows = tuple(RowView(f"r{i}", 100 + 300 * i, 6) for i in range(4))
    loose = GoodputController(6, CPU, max_time_per_token_s=10.0).decide(BatchView(rows))
    assert loose.mode == "speculating"
    assert loose.slo_violation is not None
    assert loose.slo_violation <= 1
    assert loose.lengths == GoodputController(6, CPU).decide(BatchView(rows)).lengths
    tight = GoodputController(6, CPU, max_time_per_token_s=1e-4).decide(BatchView(rows))
    assert tight.mode == "bounds out of reach"
    assert tight.slo_violation is not None
    assert tight.slo_violation > 1
    # One row that is in a hurry, and none of the others are.
    free = GoodputController(6, CPU, lengths="request").decide(BatchView(rows))
    bound = 0.9 * free.predicted_s / (1 + 0.6 + 0.36 + 0.216)
    hurried = (RowView("r0", 100, 6, max_time_per_token_s=bound), *rows[1:])
    found = GoodputController(6, CPU).decide(BatchView(hurried))
    assert found.slo_violation is not None
    assert sum(found.lengths[1:]) < sum(free.lengths[1:])
    with pytest.raises(ConfigError, match="max_time_per_token_s=0"):
        GoodputController(6, CPU, max_time_per_token_s=0)


def test_under_bounds_too_speculation_that_does_not_pay_stops_and_comes_back() -> None:
    machine, controller = Machine(CPU, 0.0), GoodputController(8, CPU, max_time_per_token_s=10.0)
    machine.run(controller, 600)
    view = BatchView((RowView("r0", 100, 8),))
    assert controller.decide(view).mode in ("not worth it", "trial")
    machine.alpha = 0.9
    machine.run(controller, 3000)
    assert controller.decide(view).mode in ("speculating", "measuring plain")


def test_an_engine_under_bounds_writes_the_same_text(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine
) -> None:
    wanted = [hf_greedy(target, prompt, 40) for prompt in prompts(3)]
    engine = make_engine(draft, controller="goodput", speculation_length=4, max_time_per_token_s=1e-6)
    outputs = engine.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=40))
    assert [list(output.token_ids) for output in outputs] == wanted
    assert engine.explain_last_plan().slo_violation is not None
    with pytest.raises(RequestRefused, match="max_time_per_token_s=-1"):
        engine.submit(Request("hurry", (5,), max_time_per_token_s=-1))
