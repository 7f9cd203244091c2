"""Optimal lengths against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distillspec.serving.control.allocation import Batch, best_by_row, best_for_all
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.simulation.hardware import loaded_experts

HAZARDS = st.lists(st.floats(0, 1), min_size=3, max_size=3)


COSTS = st.builds(CostTable.line, *(st.floats(0, limit) for limit in (0.01, 0.3, 3.0)))


def goodput(
    survival: numpy.ndarray,
    lengths: tuple[int, ...],
    contexts: list[int],
    latency: LatencyModel,
    by_model: list[bool] | None = None,
) -> float:
    """Expected tokens a second, by definition."""
    tokens = sum(1 + sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return tokens / latency.step_s(contexts, lengths, 0, by_model)


def test_a_pass_that_only_two_rows_pay_for_is_found() -> None:
    latency = LatencyModel(CostTable.line(0, 0, 10.0), CostTable.line(0, 0, 6.0))
    survival = numpy.array([[0.9], [0.9]])
    best = best_by_row(Batch(survival, numpy.array([1, 1]), numpy.array([5, 5]), latency))
    assert best.lengths.tolist() == [1, 1]
    assert best.goodput == pytest.approx(3.8 / 16)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(HAZARDS, st.integers(0, 3), st.integers(0, 50)), max_size=3),
    COSTS,
    COSTS | st.none(),
    st.just(0.0) | st.floats(0, 1),
    st.none() | st.lists(st.booleans(), min_size=3, max_size=3),
    st.just(()) | st.tuples(*(st.tuples(st.just(n), st.floats(0, 2)) for n in (1.0, 3.0, 4.0, 9.0, 12.0))),
)
def test_the_optimum_is_brute_forces(
    rows: list[tuple[list[float], int, int]],
    target: CostTable,
    draft: CostTable | None,
    per_expert: float,
    models: list[bool] | None,
    bumps: tuple[tuple[float, float], ...],
) -> None:
    knots = [(n, s + 0.1) for n, s in bumps or ((n, target.seconds(0, n)) for n in (1.0, 12.0))]
    experts = ((n, s + per_expert * loaded_experts(8, 2, n)) for n, s in knots)
    target = CostTable.rising(experts, target.per_context)
    latency = LatencyModel(target, draft, 0.2)
    survival = numpy.cumprod(numpy.array([hazards for hazards, _, _ in rows]).reshape(-1, 3), 1)
    limits = numpy.array([limit for _, limit, _ in rows], dtype=numpy.int64)
    contexts = numpy.array([context for _, _, context in rows], dtype=numpy.int64)
    by_model = None if models is None else models[: len(rows)]
    batch = Batch(
        survival, limits, contexts, latency, 0, None if by_model is None else numpy.array(by_model, dtype=bool)
    )
    best = best_by_row(batch)
    assert (best.lengths <= limits).all()
    if not rows:
        return
    every = product(*(range(limit + 1) for limit in limits))

    def rate(lengths: tuple[int, ...]) -> float:
        return goodput(survival, lengths, contexts.tolist(), latency, by_model)

    brute = max(map(rate, every))
    assert rate(tuple(best.lengths.tolist())) == pytest.approx(brute)
    assert best.goodput == pytest.approx(brute)
    for price in (brute / 3, brute, 3 * brute):
        assert best_by_row(replace(batch, price=price)).goodput == pytest.approx(brute)
    common = best_for_all(batch)
    assert common.goodput <= brute * (1 + 1e-9)
    alike = (rate(tuple(numpy.minimum(limits, k).tolist())) for k in range(4))
    assert common.goodput == pytest.approx(max(alike))


@pytest.mark.parametrize("by_model", [True, False])
@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_length_of_a_single_row_is_the_best_where_the_draft_drafts_blocks(limit: int, by_model: bool) -> None:
    latency = LatencyModel(CostTable.line(1e-4, 0.05, 1.0), CostTable(((1.0, 0.3), (4.0, 0.35))), 0.01, True)
    survival, model = numpy.array([[0.6, 0.4, 0.3]]), [by_model]
    best = best_by_row(Batch(survival, numpy.array([limit]), numpy.array([9]), latency, by_model=numpy.array(model)))
    rates = [goodput(survival, (length,), [9], latency, model) for length in range(limit + 1)]
    assert best.goodput == pytest.approx(max(rates))
    assert best.lengths.tolist() == [int(numpy.argmax(rates))]


@pytest.mark.parametrize("at_once", [False, True])
def test_little_is_lost_where_draft_passes_do_not_cost_a_line(at_once: bool) -> None:
    """Four rows cost nearly what one does, and sixteen three times that: bound by bandwidth, then by arithmetic."""
    generator, kept = numpy.random.default_rng(0), []
    draft = CostTable(((1.0, 0.1), (4.0, 0.11), (16.0, 0.33)), 1e-5)
    for _ in range(100):
        latency = LatencyModel(CostTable.line(1e-4, float(generator.uniform(0, 0.1)), 0.5), draft, at_once=at_once)
        survival, contexts = generator.random((6, 2)).cumprod(1), generator.integers(0, 400, 6)
        batch = Batch(survival, numpy.full(6, 2), contexts, latency)
        best = best_by_row(batch)
        rates = [goodput(survival, k, contexts.tolist(), latency) for k in product(range(3), repeat=6)]
        assert best.goodput == pytest.approx(goodput(survival, tuple(best.lengths), contexts.tolist(), latency))
        kept.append(best.goodput / max(rates))
    assert min(kept) > 0.93
    assert numpy.mean(kept) > 0.985


def test_prompts_beside_the_rows_make_tokens_as_dear_as_they_are_there() -> None:
    """Up to eight tokens cost the same. Beside a long prompt each one costs what it costs in a long pass."""
    target = CostTable(((1.0, 0.1), (8.0, 0.1), (100.0, 1.0)))
    batch = Batch(numpy.array([[0.5, 0.05]]), numpy.array([2]), numpy.array([5]), LatencyModel(target))
    alone, beside = best_by_row(batch), best_by_row(replace(batch, prefill_tokens=50))
    assert alone.lengths.tolist() == [2]
    assert beside.lengths.tolist() == [1]
    assert beside.seconds == pytest.approx(0.1 + 0.9 / 92 + 5e-4)
