"""Optimal lengths against brute force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product, zip_longest

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distillspec.serving.control.allocation import Batch, best_by_row, best_for_all
from distillspec.serving.control.candidates import Candidates, candidates
from distillspec.serving.costs.latency import LatencyModel, draft_work
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
    st.just(0.0) | st.floats(0, 1),
)
def test_the_optimum_is_brute_forces(
    rows: list[tuple[list[float], int, int]],
    target: CostTable,
    draft: CostTable | None,
    per_expert: float,
    models: list[bool] | None,
    bumps: tuple[tuple[float, float], ...],
    first: float,
) -> None:
    draft = None if draft is None else replace(draft, first=first)
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


def every_tree(nodes: Candidates) -> list[numpy.ndarray]:
    """All sets of nodes in which parents and elder siblings of each node are, as bool `[U]`."""
    before = [nodes.paths.index(p) if p else -1 for p in map(_predecessor, nodes.paths)]
    sets = [set[int]()]
    for node, needed in enumerate(before):
        sets += [{*own, node} for own in sets if needed == -1 or needed in own]
    return [numpy.isin(numpy.arange(len(nodes)), list(own)) for own in sets]


def _predecessor(path: tuple[int, ...]) -> tuple[int, ...]:
    return (*path[:-1], path[-1] - 1) if path[-1] else path[:-1]


def tree_rate(batch: Batch, trees: Sequence[numpy.ndarray], contexts: list[int]) -> float:
    """Expected tokens a second of trees, by definition."""
    nodes, latency = batch.nodes, batch.latency
    assert nodes is not None
    assert batch.gains is not None
    tokens = len(trees) + sum(own[taken].sum() for own, taken in zip(batch.gains, trees, strict=True))
    shapes = [nodes.shape(taken) for taken in trees]
    target_s = latency.target_s(contexts, [shape.nodes for shape in shapes])
    work = draft_work(contexts, [shape.depth for shape in shapes], latency.at_once)
    passes = work.passes
    if not latency.at_once:
        levels = zip_longest(*(shape.reads for shape in shapes), fillvalue=0)
        passes = [sum(reads) for reads in levels]
    assert latency.draft is not None
    read_s = latency.draft.per_context * work.context + latency.draft.per_row * work.rows
    read_s += latency.draft.first if passes else 0.0
    return tokens / (target_s + read_s + sum(latency.draft.seconds(0, count) for count in passes))


@pytest.mark.parametrize(("rows", "widths"), [(1, (3, 2, 1)), (2, (2, 2))])
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_trees_are_chosen_as_by_brute_force(rows: int, widths: tuple[int, ...], at_once: bool, first: int) -> None:
    """`first`: what a first pass takes more, in further passes. It may make drafting not worth it."""
    generator, kept = numpy.random.default_rng(4), []
    nodes = candidates(widths, 9)
    trees = every_tree(nodes)
    for _ in range(60):
        draft_s, verified_s = generator.uniform(0, 0.3), generator.uniform(0, 0.1)
        knots = CostTable(((1.0, 1.0), (4.0, 1.0), (24.0, 1.0 + 20 * verified_s)), 1e-4)
        draft = replace(CostTable.line(1e-5, 0.02 * draft_s, draft_s), first=first * draft_s)
        latency = LatencyModel(knots, draft, at_once=at_once)
        shares = -numpy.sort(-generator.random((rows, len(widths), max(widths))), 2)
        chances = shares / numpy.maximum(1, shares.sum(2, keepdims=True))
        contexts = generator.integers(0, 400, rows)
        survival, limits = chances[..., 0].cumprod(1), numpy.full(rows, len(widths))
        batch = Batch(survival, limits, contexts, latency, nodes=nodes, gains=nodes.survival(chances))
        best = best_by_row(batch)
        assert best.taken is not None or first
        taken = numpy.zeros((rows, len(nodes)), dtype=bool) if best.taken is None else best.taken
        assert best.goodput == pytest.approx(tree_rate(batch, list(taken), contexts.tolist()))
        rates = [tree_rate(batch, own, contexts.tolist()) for own in product(trees, repeat=rows)]
        kept.append(best.goodput / max(rates))
        chains = best_by_row(Batch(survival, limits, contexts, latency))
        assert best.goodput >= chains.goodput * (1 - 1e-9)
    assert max(kept) <= 1 + 1e-9
    assert min(kept) > 0.97
    assert numpy.mean(kept) > 0.998


def test_prompts_beside_the_rows_make_tokens_as_dear_as_they_are_there() -> None:
    """Up to eight tokens cost the same. Beside a long prompt each one costs what it costs in a long pass."""
    target = CostTable(((1.0, 0.1), (8.0, 0.1), (100.0, 1.0)))
    batch = Batch(numpy.array([[0.5, 0.05]]), numpy.array([2]), numpy.array([5]), LatencyModel(target))
    alone, beside = best_by_row(batch), best_by_row(replace(batch, prefill_tokens=50))
    assert alone.lengths.tolist() == [2]
    assert beside.lengths.tolist() == [1]
    assert beside.seconds == pytest.approx(0.1 + 0.9 / 92 + 5e-4)
