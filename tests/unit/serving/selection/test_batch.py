"""Drafts of all rows of a batch, chosen together."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy
import pytest

from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.selection.batch import NO_DRAFT, Batch, Prospect

SMALL, LARGE = CostTable.line(0.0, 1e-5, 1e-3), CostTable.line(0.0, 1e-5, 4e-3)
COSTS = LatencyModel(CostTable.line(1e-7, 2e-4, 2e-2), SMALL)
LEVELS = 4


def prospect(*chances: float, reading_s: Sequence[float] | None = None, left: float = 64.0) -> Prospect:
    """Return a row of 100 tokens whose drafts' tokens are accepted with these chances. 0: a draft may not draft."""
    survival = numpy.array(chances)[:, None].repeat(LEVELS, 1).cumprod(1)
    read = numpy.zeros(len(chances)) if reading_s is None else numpy.array(reading_s)
    return Prospect(survival.cumsum(1), numpy.array(chances) > 0, read, left, 100)


def batch(rows: Sequence[Prospect], tables: Sequence[CostTable], fixed: int | None = None) -> Batch:
    drafts = [LatencyModel(COSTS.target, table) for table in tables]
    return Batch(rows, drafts, COSTS, fixed)


def best(found: Batch, own: Sequence[int], movable: bool = True) -> list[int]:
    return found.best(numpy.array(own), numpy.full(len(own), movable)).tolist()


def test_alone_it_is_the_goodput_of_the_rows_own_chain() -> None:
    survival = 0.7 ** numpy.arange(1, LEVELS + 1)
    for table in (SMALL, LARGE):
        costs = LatencyModel(COSTS.target, table)
        rates = [(1 + survival[:length].sum()) / costs.step_s([100], [length]) for length in range(1, LEVELS + 1)]
        assert batch([prospect(0.7)], [table]).rate(numpy.array([0])) == pytest.approx(max(rates), rel=1e-9)
        fixed = batch([prospect(0.7)], [table], fixed=2).rate(numpy.array([0]))
        assert fixed == pytest.approx(rates[1], rel=1e-9)


def test_rows_that_share_a_draft_share_its_passes() -> None:
    rows = [prospect(0.7, 0.7)] * 4
    costs = LatencyModel(COSTS.target, SMALL)
    together, apart = (batch(rows, [SMALL, SMALL], fixed=2).rate(numpy.array(own)) for own in ([0] * 4, [0, 0, 1, 1]))
    tokens = 4 * (1 + 0.7 + 0.49)
    assert together == pytest.approx(tokens / costs.step_s([100] * 4, [2] * 4), rel=1e-9)
    assert apart == pytest.approx(tokens / (costs.target_s([100] * 4, [2] * 4) + 2 * costs.loop_s(2, 0, 2)), rel=1e-9)


def test_what_is_believed_chooses_lengths_and_what_is_expected_comes_of_them() -> None:
    """A draft on trial drafts as far as it may be good."""
    optimistic, expected = (batch([prospect(chance)], [SMALL]) for chance in (0.9, 0.02))
    own = numpy.array([0])
    price = expected.rate(numpy.array([NO_DRAFT]))
    assert expected.rate(own, price) == pytest.approx(price)
    costs = LatencyModel(COSTS.target, SMALL)
    written = 1 + (0.02 ** numpy.arange(1, LEVELS + 1)).sum()
    tried = expected.rate(own, price, optimistic)
    assert tried == pytest.approx(written / costs.step_s([100], [LEVELS]), rel=1e-9)
    assert optimistic.rate(own, price, optimistic) == optimistic.rate(own, price)


def test_trees_cost_their_nodes_and_what_the_draft_reads() -> None:
    """Two levels: three nodes of which two are on the first level, and one of these is a parent."""
    tokens, shapes = numpy.array([[0.8, 1.2]]), numpy.array([[[2.0, 3.0]], [[1.0, 3.0]]])
    row = Prospect(tokens, numpy.array([True]), numpy.zeros(1), 64.0, 0, shapes=shapes)
    costs = LatencyModel(COSTS.target, SMALL)
    found = batch([row] * 2, [SMALL], fixed=2).rate(numpy.array([0, 0]))
    seconds = costs.target_s([0, 0], [3, 3]) + 2 * SMALL.seconds(0, 2) + 2 * 1e-5  # of one more parent a row
    assert found == pytest.approx(2 * 2.2 / seconds, rel=1e-9)


def test_dear_nodes_shorten_trees() -> None:
    tokens, shapes = numpy.array([[0.8, 1.2]]), numpy.array([[[1.0, 40.0]], [[1.0, 2.0]]])
    row = Prospect(tokens, numpy.array([True]), numpy.zeros(1), 64.0, 0, shapes=shapes)
    costs = LatencyModel(COSTS.target, SMALL)
    assert batch([row], [SMALL]).rate(numpy.array([0])) == pytest.approx(1.8 / costs.step_s([0], [1]), rel=1e-9)


def test_rows_without_a_draft_cost_no_passes() -> None:
    rows = [prospect(0.7)] * 2
    half = batch(rows, [SMALL], fixed=1).rate(numpy.array([0, NO_DRAFT]))
    target_s = COSTS.target.seconds(200, 2) + COSTS.target.seconds(0, 3) - COSTS.target.seconds(0, 2)
    assert half == pytest.approx((2 + 0.7) / (target_s + SMALL.seconds(0, 1)), rel=1e-9)


def test_a_block_is_one_pass() -> None:
    row, chain = prospect(0.7), LatencyModel(COSTS.target, SMALL)
    block = LatencyModel(COSTS.target, SMALL, drafts_block=True)
    rates = [Batch([row], [draft], COSTS).rate(numpy.array([0])) for draft in (chain, block)]
    assert rates[1] > rates[0]


def test_two_pairs_of_rows_come_to_one_draft_though_no_row_gains_by_moving_alone() -> None:
    """What a draft's passes cost is saved by the last row that leaves it."""
    rows = [prospect(0.6, 0.5)] * 2 + [prospect(0.55, 0.62)] * 2
    found = batch(rows, [SMALL, SMALL])
    apart = numpy.array([0, 0, 1, 1])
    assert found.rate(numpy.array([0, 0, 0, 1])) < found.rate(apart)
    assert best(found, apart.tolist()) == [0, 0, 0, 0]


def test_drafts_that_are_worth_their_passes_stay_apart() -> None:
    rows = [prospect(0.8, 0.1)] * 2 + [prospect(0.1, 0.8)] * 2
    assert best(batch(rows, [SMALL, SMALL]), [0, 0, 0, 0]) == [0, 0, 1, 1]


def test_changes_that_hardly_pay_are_not_made() -> None:
    assert best(batch([prospect(0.6, 0.605)], [SMALL, SMALL]), [0]) == [0]
    assert best(batch([prospect(0.6, 0.7)], [SMALL, SMALL]), [0]) == [1]


def test_rows_that_may_not_move_keep_their_drafts() -> None:
    assert best(batch([prospect(0.2, 0.9)], [SMALL, SMALL]), [0], movable=False) == [0]


def test_a_draft_that_may_not_draft_is_not_chosen() -> None:
    assert best(batch([prospect(0.3, 0.0)] * 2 + [prospect(0.3, 0.9)] * 2, [SMALL, SMALL]), [0] * 4)[:2] == [0, 0]


def test_a_long_text_is_read_for_a_long_rest_alone() -> None:
    """Reading takes a fifth of a second, in which all rows wait."""
    moved = [
        best(batch([prospect(0.5, 0.7, reading_s=(0.0, 0.2), left=left)], [SMALL, SMALL]), [0]) for left in (32, 2000)
    ]
    assert moved == [[0], [1]]


@pytest.mark.parametrize("seed", range(12))
def test_choices_are_near_the_best_of_all(seed: int) -> None:
    """By enumeration, of three drafts of unlike size for four rows."""
    random = numpy.random.default_rng(seed)
    rows = [prospect(*random.uniform(0.1, 0.9, 3)) for _ in range(4)]
    found = batch(rows, [SMALL, CostTable.line(0.0, 1e-5, 2e-3), LARGE])
    chosen = numpy.array([0, 0, 0, 0])
    for _ in range(3):
        chosen = found.best(chosen, numpy.ones(4, dtype=bool))
    top = max(found.rate(numpy.array(own)) for own in product(range(3), repeat=4))
    assert found.rate(chosen) > 0.97 * top
