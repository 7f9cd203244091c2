"""Optimal lengths and trees against brute force, for rows of one draft."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distillspec.serving.base.candidates import Candidates, candidates
from distillspec.serving.base.ladder import Ladder, Recorded
from distillspec.serving.base.rows import RowView
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.offers import StepPlan
from distillspec.serving.planning.step_planner import StepPlanner
from distillspec.serving.simulation.hardware import loaded_experts
from distillspec.types import Floats

HAZARDS = st.lists(st.floats(0, 1), min_size=3, max_size=3)


COSTS = st.builds(CostTable.line, *(st.floats(0, limit) for limit in (0.01, 0.3, 3.0)))


class Chances(AcceptanceEstimate):
    """Known acceptance: P(the child of rank r at position i is accepted | its parent is), `[n, V, W]` by row."""

    def __init__(self, chances: Floats) -> None:
        super().__init__(chances.shape[1], chances.shape[2])
        self.known = chances

    def of_rows(self, rows: Sequence[RowView], *, optimism_se: float = 0.0) -> Floats:
        return self.known[[int(row.sequence_id) for row in rows]]


def rows_of(contexts: Sequence[int], limits: Sequence[int], *, drafts_block: bool = False) -> list[RowView]:
    pairs = enumerate(zip(contexts, limits, strict=True))
    return [RowView(str(n), context, limit, drafts_block=drafts_block, wide=True) for n, (context, limit) in pairs]


def goodput(survival: Floats, lengths: Sequence[int], contexts: Sequence[int], latency: LatencyModel) -> float:
    """Expected tokens a second, by definition."""
    tokens = sum(1 + sum(row[:length]) for row, length in zip(survival, lengths, strict=True))
    return float(tokens / latency.step_s(contexts, lengths))


def best_plan(rows: Sequence[RowView], chances: Floats, latency: LatencyModel, price: float = 0.0) -> StepPlan:
    return StepPlanner(rows, chances.shape[1], Chances(chances), latency).at_best_price(price).plan(rows)


def test_a_pass_that_only_two_rows_pay_for_is_found() -> None:
    latency = LatencyModel(CostTable.line(0, 0, 10.0), CostTable.line(0, 0, 6.0))
    best = best_plan(rows_of([5, 5], [1, 1]), numpy.full((2, 1, 1), 0.9), latency)
    assert best.depths == [1, 1]
    assert best.goodput == pytest.approx(3.8 / 16)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.tuples(HAZARDS, st.integers(0, 3), st.integers(0, 50)), max_size=3),
    COSTS,
    COSTS,
    st.just(0.0) | st.floats(0, 1),
    st.just(()) | st.tuples(*(st.tuples(st.just(n), st.floats(0, 2)) for n in (1.0, 3.0, 4.0, 9.0, 12.0))),
    st.just(0.0) | st.floats(0, 1),
)
def test_the_optimum_is_nearly_brute_forces(
    rows: list[tuple[list[float], int, int]],
    target: CostTable,
    draft: CostTable,
    per_expert: float,
    bumps: tuple[tuple[float, float], ...],
    first: float,
) -> None:
    """At the price that is looked for the optimum is exact. A price is near enough within two hundredths."""
    draft = replace(draft, first=first)
    knots = [(n, s + 0.1) for n, s in bumps or ((n, target.seconds(0, n)) for n in (1.0, 12.0))]
    experts = ((n, s + per_expert * loaded_experts(8, 2, n)) for n, s in knots)
    latency = LatencyModel(CostTable.rising(experts, target.per_context), draft, 0.2)
    chances = numpy.array([hazards for hazards, _, _ in rows]).reshape(-1, 3, 1)
    limits, contexts = [limit for _, limit, _ in rows], [context for _, _, context in rows]
    views, survival = rows_of(contexts, limits), chances[..., 0].cumprod(1)
    best = best_plan(views, chances, latency)
    assert all(depth <= limit for depth, limit in zip(best.depths, limits, strict=True))
    if not rows:
        return

    def rate(lengths: Sequence[int]) -> float:
        return goodput(survival, lengths, contexts, latency)

    brute = max(map(rate, product(*(range(limit + 1) for limit in limits))))
    assert best.goodput == pytest.approx(rate(best.depths))
    assert 0.99 * brute <= best.goodput <= brute * (1 + 1e-9)
    exact = best_plan(views, chances, latency, price=brute)
    assert exact.goodput == pytest.approx(brute)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(HAZARDS, st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=3), COSTS, COSTS)
def test_chains_of_one_length_are_what_they_give_and_take(
    rows: list[tuple[list[float], int, int]], target: CostTable, draft: CostTable
) -> None:
    latency = LatencyModel(CostTable.line(target.per_context, target.seconds(0, 1), 0.1), draft)
    survival = numpy.cumprod(numpy.array([hazards for hazards, _, _ in rows]), 1)
    limits, contexts = numpy.array([limit for _, limit, _ in rows]), numpy.array([own for _, _, own in rows])
    batch = ChainBatch(survival, limits, contexts, latency)
    assert batch.alike.tolist() == [numpy.minimum(limits, k).tolist() for k in range(int(limits.max()) + 1)]
    rates = [goodput(survival, lengths, contexts.tolist(), latency) for lengths in batch.alike.tolist()]
    assert [one.goodput for one in batch.expected(batch.alike)] == pytest.approx(rates)


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_the_length_of_a_single_row_is_the_best_where_the_draft_drafts_blocks(limit: int) -> None:
    latency = LatencyModel(CostTable.line(1e-4, 0.05, 1.0), CostTable(((1.0, 0.3), (4.0, 0.35))), 0.01, True)
    chances = numpy.array([[[0.6], [0.7], [0.8]]])
    best = best_plan(rows_of([9], [limit], drafts_block=True), chances, latency)
    rates = [goodput(chances[..., 0].cumprod(1), (length,), [9], latency) for length in range(limit + 1)]
    assert best.goodput == pytest.approx(max(rates))
    assert best.depths == [int(numpy.argmax(rates))]


@pytest.mark.parametrize("drafts_block", [False, True])
def test_little_is_lost_where_draft_passes_do_not_cost_a_line(drafts_block: bool) -> None:
    """Four rows cost nearly what one does, and sixteen three times that: bound by bandwidth, then by arithmetic."""
    generator, kept = numpy.random.default_rng(0), []
    draft = CostTable(((1.0, 0.1), (4.0, 0.11), (16.0, 0.33)), 1e-5)
    for _ in range(100):
        latency = LatencyModel(
            CostTable.line(1e-4, float(generator.uniform(0, 0.1)), 0.5), draft, drafts_block=drafts_block
        )
        chances, contexts = generator.random((6, 2, 1)), generator.integers(0, 400, 6).tolist()
        best = best_plan(rows_of(contexts, [2] * 6, drafts_block=drafts_block), chances, latency)
        survival = chances[..., 0].cumprod(1)
        rates = [goodput(survival, k, contexts, latency) for k in product(range(3), repeat=6)]
        assert best.goodput == pytest.approx(goodput(survival, best.depths, contexts, latency))
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


def tree_rate(
    nodes: Candidates, gains: Floats, trees: Sequence[numpy.ndarray], contexts: list[int], latency: LatencyModel
) -> float:
    """Expected tokens a second of trees, by definition."""
    tokens = len(trees) + sum(own[taken].sum() for own, taken in zip(gains, trees, strict=True))
    shapes = [nodes.shape(taken) for taken in trees]
    target_s = latency.target_s(contexts, [shape.nodes for shape in shapes])
    drawn = [(context, shape.reads) for context, shape in zip(contexts, shapes, strict=True) if shape.depth]
    return float(tokens / (target_s + (latency.trees_s(drawn) if drawn else 0.0)))


@pytest.mark.parametrize(("rows", "widths"), [(1, (3, 2, 1)), (2, (2, 2))])
@pytest.mark.parametrize("drafts_block", [False, True])
@pytest.mark.parametrize("first", [0, 1])
def test_trees_are_chosen_nearly_as_by_brute_force(
    rows: int, widths: tuple[int, ...], drafts_block: bool, first: int
) -> None:
    """`first`: what a first pass takes more, in further passes. It may make drafting not worth it."""
    generator, kept = numpy.random.default_rng(4), []
    nodes = candidates(widths, 9)
    trees = every_tree(nodes)
    for _ in range(60):
        draft_s, verified_s = generator.uniform(0, 0.3), generator.uniform(0, 0.1)
        knots = CostTable(((1.0, 1.0), (4.0, 1.0), (24.0, 1.0 + 20 * verified_s)), 1e-4)
        draft = replace(CostTable.line(1e-5, 0.02 * draft_s, draft_s), first=first * draft_s)
        latency = LatencyModel(knots, draft, drafts_block=drafts_block)
        shares = -numpy.sort(-generator.random((rows, len(widths), max(widths))), 2)
        chances = shares / numpy.maximum(1, shares.sum(2, keepdims=True))
        contexts = generator.integers(0, 400, rows).tolist()
        views = rows_of(contexts, [len(widths)] * rows, drafts_block=drafts_block)
        best = StepPlanner(views, len(widths), Chances(chances), latency, trees=nodes).at_best_price().plan(views)
        gains = nodes.survival(chances)
        rates = [tree_rate(nodes, gains, own, contexts, latency) for own in product(trees, repeat=rows)]
        kept.append(best.goodput / max(rates))
        assert best.goodput >= 0.99 * best_plan(views, chances[..., :1], latency).goodput
    assert max(kept) <= 1 + 1e-9
    assert min(kept) > 0.97
    assert numpy.mean(kept) > 0.998


def test_prompts_beside_the_rows_make_tokens_as_dear_as_they_are_there() -> None:
    """Up to eight tokens cost the same. Beside a long prompt each one costs what it costs in a long pass."""
    latency = LatencyModel(CostTable(((1.0, 0.1), (8.0, 0.1), (100.0, 1.0))), CostTable.line(0, 0, 1e-4))
    rows, chances = rows_of([5], [2]), numpy.array([[[0.5], [0.1]]])
    alone, beside = (
        StepPlanner(rows, 2, Chances(chances), latency, prefill_tokens=n).at_best_price().plan(rows) for n in (0, 50)
    )
    assert (alone.depths, beside.depths) == ([2], [1])
    assert beside.expected.seconds == pytest.approx(0.1 + 0.9 / 92 + 1e-4)


def test_lengths_are_chosen_nearly_as_by_brute_force_where_passes_are_recorded() -> None:
    """Numbers of tokens in steps: what fills a step up costs nothing, and the next token a whole step."""
    generator, kept = numpy.random.default_rng(5), []
    ladder = Recorded(Ladder((1, 2, 4, 6, 9, 12, 16)))
    for _ in range(80):
        per_token, draft_s = (float(generator.uniform(0, most)) for most in (0.3, 0.2))
        tables = CostTable.line(1e-4, per_token, 1.0), CostTable.line(1e-5, 0.1 * draft_s, draft_s)
        latency = LatencyModel(*tables).recorded_in(ladder)
        chances, contexts = generator.random((3, 3, 1)), generator.integers(0, 400, 3).tolist()
        survival = chances[..., 0].cumprod(1)
        rates = [goodput(survival, k, contexts, latency) for k in product(range(4), repeat=3)]
        views = rows_of(contexts, [3] * 3)
        best, exact = best_plan(views, chances, latency), best_plan(views, chances, latency, price=max(rates))
        assert best.goodput == pytest.approx(goodput(survival, best.depths, contexts, latency))
        assert exact.goodput == pytest.approx(max(rates))
        kept.append(best.goodput / max(rates))
    assert max(kept) <= 1 + 1e-9
    assert min(kept) > 0.95
    assert numpy.mean(kept) > 0.995


def test_a_token_that_fills_a_recorded_number_up_is_free_and_one_beyond_it_is_not() -> None:
    """Three rows alone run as three tokens. Six tokens run as eight, and eight cost what six do."""
    latency = LatencyModel(CostTable.line(0.0, 0.02, 0.1), CostTable.line(0.0, 0.0, 1e-4))
    rows, chances = rows_of([5] * 3, [2] * 3), numpy.array([[[0.9], [0.1]]] * 3)
    exact = best_plan(rows, chances, latency)
    padded = best_plan(rows, chances, latency.recorded_in(Recorded(Ladder((3, 8, 20)))))
    assert sum(exact.depths) == 3
    assert sum(padded.depths) == 5
    assert padded.expected.seconds == pytest.approx(0.1 + 8 * 0.02 + 2e-4)
