"""Optimal lengths against brute force."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distillspec.serving.control.allocation import Batch, best_by_row, best_for_all
from distillspec.serving.control.latency import ForwardCost, LatencyModel

HAZARDS = st.lists(st.floats(0, 1), min_size=3, max_size=3)


COSTS = st.builds(ForwardCost, *(st.floats(0, limit) for limit in (0.01, 0.3, 3.0)))


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
    latency = LatencyModel(ForwardCost(0, 0, 10.0), ForwardCost(0, 0, 6.0))
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
    st.just(()) | st.tuples(*(st.tuples(st.just(n), st.floats(-0.05, 2)) for n in (1.0, 3.0, 4.0, 9.0))),
)
def test_the_optimum_is_brute_forces(
    rows: list[tuple[list[float], int, int]],
    target: ForwardCost,
    draft: ForwardCost | None,
    per_expert: float,
    models: list[bool] | None,
    bumps: tuple[tuple[float, float], ...],
) -> None:
    target = replace(target, fixed=target.fixed + 0.1, per_expert=per_expert, experts=8, active=2, bumps=bumps)
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
    common = best_for_all(batch)
    assert common.goodput <= brute * (1 + 1e-9)
    alike = (rate(tuple(numpy.minimum(limits, k).tolist())) for k in range(4))
    assert common.goodput == pytest.approx(max(alike))
