"""Rows of several drafts: lengths against all choices by enumeration, and within bounds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy
import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.candidates import candidates
from distillspec.serving.base.rows import RowView
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.costs.chain_batch import ChainBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.bounded import best_within
from distillspec.serving.planning.step_planner import PRICE_TOLERANCE, StepPlanner

MOST = 3
TARGET = CostTable(((1.0, 0.02), (4.0, 0.021), (8.0, 0.026), (32.0, 0.07)), 1e-6)
COSTS = LatencyModel(
    TARGET,
    CostTable(((1.0, 1e-3), (8.0, 2e-3))),
    members={
        "a": CostTable(((1.0, 1e-3), (8.0, 2e-3)), 1e-7),
        "b": CostTable(((1.0, 4e-3), (8.0, 5e-3)), 1e-7),
        "c": CostTable(((1.0, 2e-3), (8.0, 6e-3)), 1e-7),
    },
)


def learnt(seed: int, sources: list[str]) -> AcceptanceEstimate:
    """Return an estimate for which each draft, and each row, is different."""
    found, random = AcceptanceEstimate(MOST), numpy.random.default_rng(seed)
    for number, source in enumerate(sources):
        chance = random.uniform(0.2, 0.95)
        for _ in range(60):
            accepted = int((random.random(MOST) < chance).cumprod().sum())
            found.observe([RowResult.chain(f"r{number}", MOST, accepted, accepted + 1, source)], [source])
    return found


def seconds(rows: list[RowView], lengths: tuple[int, ...], prefill: int) -> float:
    """Return what a step takes: the target once, each draft for its rows."""
    n, context = len(rows), sum(row.context_tokens for row in rows)
    tokens = n + prefill
    found = TARGET.seconds(context, n, n) + TARGET.seconds(0, tokens + sum(lengths)) - TARGET.seconds(0, tokens)
    for source in {row.source for row in rows}:
        own = [(row, k) for row, k in zip(rows, lengths, strict=True) if row.source == source and k]
        if own:
            drafts = COSTS.of_draft(source)
            found += drafts.draft_s([row.context_tokens for row, _ in own], [k for _, k in own])
    return found


@pytest.mark.parametrize("prefill", [0, 20])
@pytest.mark.parametrize("sources", [["a", "b"], ["b", "a", "b", "c"], ["c", "b", "a", "a"]])
def test_lengths_are_near_the_best_of_all_choices(sources: list[str], prefill: int) -> None:
    kept = []
    for seed in range(6):
        rows = [RowView(f"r{n}", 50 + 40 * n, MOST, source=source) for n, source in enumerate(sources)]
        acceptance = learnt(seed, sources)
        planner = StepPlanner(rows, MOST, acceptance, COSTS, prefill_tokens=prefill).at_best_price()
        chances = acceptance.chances([row.sequence_id for row in rows], sources)[..., 0]
        survival = numpy.concatenate([numpy.ones((len(rows), 1)), chances.cumprod(1)], 1)

        def goodput(lengths: tuple[int, ...], survival: numpy.ndarray = survival, rows: list[RowView] = rows) -> float:
            tokens = sum(survival[n, : k + 1].sum() for n, k in enumerate(lengths))
            return float(tokens / seconds(rows, lengths, prefill))

        found = planner.plan(rows)
        best = max(product(range(MOST + 1), repeat=len(rows)), key=goodput)
        own = tuple(found.depths)
        kept.append(goodput(own) / goodput(best))
        assert found.goodput == pytest.approx(goodput(own), rel=1e-9)
        assert planner.plain(rows).goodput == pytest.approx(goodput((0,) * len(rows)), rel=1e-9)
        ones = planner.chains(rows, [1] * len(rows))
        assert ones.goodput == pytest.approx(goodput((1,) * len(rows)), rel=1e-9)
    assert min(kept) > 0.98
    assert numpy.mean(kept) > 0.995


@pytest.mark.parametrize("sources", [["a", "b"], ["b", "a", "b", "c"], ["c", "b", "a", "a"]])
def test_the_plan_before_leads_to_the_same_one_in_a_single_round(sources: list[str]) -> None:
    """Each draft's nodes are priced beside those of the others. Without a plan before, these come of a round more."""
    for seed in range(6):
        rows = [RowView(f"r{n}", 50 + 40 * n, MOST, source=source) for n, source in enumerate(sources)]
        acceptance = learnt(seed, sources)
        first = StepPlanner(rows, MOST, acceptance, COSTS).at_best_price().plan(rows)
        again = StepPlanner(rows, MOST, acceptance, COSTS, before=first.drafted).at_best_price(first.goodput).plan(rows)
        assert again.goodput >= first.goodput * (1 - PRICE_TOLERANCE)


def test_a_draft_that_is_left_to_a_single_row_does_not_run_for_it() -> None:
    """Its other rows would have to read long texts first. A third of its passes pays for the row, all do not."""
    costs = replace(COSTS, target=CostTable.line(1e-6, 1e-4, 0.02))
    rows = [RowView(f"r{n}", 60, MOST, source="a", room=500) for n in range(3)]
    rows += [RowView(f"r{n}", 60, MOST, source="c", unread_tokens=600 if n > 3 else 0, room=8) for n in range(3, 6)]
    plan = StepPlanner(rows, MOST, AcceptanceEstimate(MOST), costs).at_best_price().plan(rows)
    assert all(depth > 0 for depth in plan.depths[:3])
    assert plan.depths[3:] == [0, 0, 0]
    sharing = [row._replace(unread_tokens=0) for row in rows]
    assert min(StepPlanner(sharing, MOST, AcceptanceEstimate(MOST), costs).at_best_price().plan(sharing).depths) > 0


def test_trees_of_several_drafts_are_priced_together() -> None:
    rows = tuple([RowView(f"r{n}", 60, MOST, source=source, wide=True) for n, source in enumerate("abba")])
    acceptance, cheap = AcceptanceEstimate(MOST, 3), replace(COSTS, target=CostTable.line(1e-6, 1e-4, 0.02))
    trees = StepPlanner(rows, MOST, acceptance, cheap, trees=candidates((3,) * MOST, 8)).at_best_price().plan(rows)
    chains = StepPlanner(rows, MOST, acceptance, cheap).at_best_price().plan(rows)
    assert trees.goodput >= chains.goodput * (1 - 1e-3)
    assert max(max(each.shape.widths, default=0) for each in trees.chosen) > 1


def test_one_draft_is_planned_for_at_its_own_costs() -> None:
    rows = tuple([RowView(f"r{n}", 60, MOST, source="b") for n in range(3)])
    found = StepPlanner(rows, MOST, AcceptanceEstimate(MOST), COSTS).at_best_price().plan(rows)
    alone = LatencyModel(TARGET, COSTS.members["b"])
    same = [row._replace(source="draft") for row in rows]
    other = StepPlanner(same, MOST, AcceptanceEstimate(MOST), alone).at_best_price().plan(same)
    assert (found.goodput, found.depths) == (other.goodput, other.depths)
    assert found.nodes


def test_bounds_hold_with_several_drafts() -> None:
    rows = [RowView(f"r{n}", 60, MOST, source=source) for n, source in enumerate("ab")]
    batch = ChainBatch.of_rows(rows, AcceptanceEstimate(MOST).of_rows(rows)[..., 0].cumprod(1), COSTS)
    for own in ((0, 0), (1, 0), (0, 2), (2, 3)):
        (expected,) = batch.expected(numpy.array([own]))
        assert expected.seconds == pytest.approx(seconds(rows, own, 0), rel=1e-9), "each draft's own passes"
    lengths, excess = best_within(batch, numpy.array([0.02, 0.02]), numpy.array([0, 0]))
    assert excess <= 1 + 1e-9
    emitted = batch.row_tokens[[0, 1], lengths].min()
    assert seconds(rows, tuple(lengths.tolist()), 0) / emitted < 0.02
