"""Lengths for rows of several drafts, against all choices by enumeration."""

from __future__ import annotations

from itertools import product

import numpy
import pytest

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.allocation import best_by_row
from distillspec.serving.control.candidates import candidates
from distillspec.serving.control.step_batch import StepBatch
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

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
            drafts = COSTS.of_draft(False, source)
            found += drafts.draft_s([row.context_tokens for row, _ in own], [k for _, k in own])
    return found


@pytest.mark.parametrize("prefill", [0, 20])
@pytest.mark.parametrize("sources", [["a", "b"], ["b", "a", "b", "c"], ["c", "b", "a", "a"]])
def test_lengths_are_near_the_best_of_all_choices(sources: list[str], prefill: int) -> None:
    for seed in range(6):
        rows = [RowView(f"r{n}", 50 + 40 * n, MOST, source=source) for n, source in enumerate(sources)]
        acceptance = learnt(seed, sources)
        batch = StepBatch.of(BatchView(tuple(rows), prefill), MOST, acceptance, COSTS)
        chances = acceptance.chances([row.sequence_id for row in rows], sources)[..., 0]
        survival = numpy.concatenate([numpy.ones((len(rows), 1)), chances.cumprod(1)], 1)

        def goodput(lengths: tuple[int, ...], survival: numpy.ndarray = survival, rows: list[RowView] = rows) -> float:
            tokens = sum(survival[n, : k + 1].sum() for n, k in enumerate(lengths))
            return float(tokens / seconds(rows, lengths, prefill))

        found = batch.best(alike=False)
        best = max(product(range(MOST + 1), repeat=len(rows)), key=goodput)
        own = tuple(found.lengths.tolist())
        assert goodput(own) > 0.99 * goodput(best)
        assert found.goodput == pytest.approx(goodput(own), rel=1e-9)
        assert batch.plain.goodput == pytest.approx(goodput((0,) * len(rows)), rel=1e-9)
        ones = batch.expected(numpy.ones(len(rows), dtype=numpy.int64))
        assert ones.goodput == pytest.approx(goodput((1,) * len(rows)), rel=1e-9)


def test_trees_of_several_drafts_are_priced_together() -> None:
    rows = tuple([RowView(f"r{n}", 60, MOST, source=source, wide=True) for n, source in enumerate("abba")])
    acceptance, trees = AcceptanceEstimate(MOST, 3), candidates((3,) * MOST, 8)
    batch = StepBatch.of(BatchView(rows), MOST, acceptance, COSTS, trees=trees)
    chains = StepBatch.of(BatchView(rows), MOST, acceptance, COSTS)
    found = batch.best(alike=False)
    assert found.goodput >= chains.best(alike=False).goodput * (1 - 1e-9)
    assert found.taken is not None
    assert found.taken.shape == (4, len(trees))
    assert (found.lengths == (found.taken * trees.depths).max(1)).all()


def test_one_draft_is_planned_for_as_before() -> None:
    rows = tuple([RowView(f"r{n}", 60, MOST, source="b") for n in range(3)])
    batch = StepBatch.of(BatchView(rows), MOST, AcceptanceEstimate(MOST), COSTS)
    (part,) = batch.parts
    found, alone = batch.best(alike=False), best_by_row(part.batch)
    assert (found.goodput, found.lengths.tolist()) == (alone.goodput, alone.lengths.tolist())
    assert part.batch.latency.draft is COSTS.members["b"]


def test_bounds_hold_with_several_drafts() -> None:
    rows = tuple([RowView(f"r{n}", 60, MOST, source=source) for n, source in enumerate("ab")])
    batch = StepBatch.of(BatchView(rows), MOST, AcceptanceEstimate(MOST), COSTS)
    best = batch.best(alike=False)
    bounds = numpy.array([0.02, 0.02])
    planned, excess = batch.within(bounds, best, best.goodput, 0.0, alike=False)
    assert excess <= 1 + 1e-9
    taken_s = seconds(list(rows), tuple(planned.lengths.tolist()), 0)
    assert taken_s / min(1 + acc for acc in [planned.tokens / 2 - 1]) < 0.021
