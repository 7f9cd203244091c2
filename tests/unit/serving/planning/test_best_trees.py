"""Trees of one draft for the rows of a step: against every choice of nodes, and where tables jump."""

from __future__ import annotations

from itertools import product

import numpy
import pytest

from distillspec.serving.base.candidates import Candidates, candidates, chains
from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.best_trees import Drafted, best_trees, within
from distillspec.types import Floats

TARGET = CostTable.line(0.0, 1e-3, 1e-2)
COSTS = LatencyModel(TARGET, CostTable.line(0.0, 5e-4, 2e-3))


def costs_of(latency: LatencyModel, nodes: Candidates, rows: int, times: int = 1) -> DraftedCosts:
    contexts = numpy.zeros(rows, dtype=numpy.int64)
    return DraftedCosts(latency, contexts, nodes.depth, rows * (times - 1), nodes=times * len(nodes))


def value(found: tuple[Drafted, ...], missed: Floats, price: float, latency: LatencyModel) -> float:
    """Tokens, less the seconds of the step at the price."""
    tokens = sum(own.tokens * chance for own, chance in zip(found, missed, strict=True))
    added = sum(own.shape.nodes for own in found)
    target_s = latency.target.seconds(0, len(found) + added) - latency.target.seconds(0, len(found))
    drawn = [(0, own.shape.reads) for own in found if own.shape.depth]
    return tokens - price * (target_s + (latency.trees_s(drawn) if drawn else 0.0))


def every_tree(nodes: Candidates, gains: Floats) -> list[Drafted]:
    """All sets of nodes with their parents and elder siblings."""
    found = []
    for taken in product([False, True], repeat=len(nodes)):
        paths = {path for path, own in zip(nodes.paths, taken, strict=True) if own}
        needed = {path[:-1] for path in paths if path[:-1]}
        needed |= {(*path[:-1], path[-1] - 1) for path in paths if path[-1]}
        if needed <= paths:
            kept = numpy.array(taken)
            found.append(Drafted(float(gains[kept].sum()), 0.0, nodes.shape(kept)))
    return found


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("price", [40.0, 80.0, 150.0])
def test_no_trees_of_all_rows_together_are_worth_more(seed: int, price: float) -> None:
    nodes, random = candidates((2, 2), 6), numpy.random.default_rng(seed)
    chances = numpy.sort(random.uniform(0, 0.5, (2, 2, 2)), -1)[..., ::-1]
    gains, missed = nodes.survival(chances), random.uniform(0.5, 1.0, 2)
    found = best_trees(nodes, gains, missed, costs_of(COSTS, nodes, 2), price)
    best = max(value(pair, missed, price, COSTS) for pair in product(*[every_tree(nodes, own) for own in gains]))
    # Nodes are taken by their gains alone: those that the draft reads cost half a millisecond more.
    assert best - 5e-4 * price * 2 <= value(found, missed, price, COSTS) <= best + 1e-12


def test_what_rows_are_said_to_cost_is_what_the_step_takes() -> None:
    nodes = candidates((2, 1, 1), 6)
    gains = nodes.survival(numpy.full((3, 3, 2), [[[0.6, 0.2]]]))
    found = best_trees(nodes, gains, numpy.ones(3), costs_of(COSTS, nodes, 3), 60.0)
    assert all(own.shape.depth for own in found)
    expected = -value(found, numpy.zeros(3), 1.0, COSTS)
    assert sum(own.seconds for own in found) == pytest.approx(expected)


def test_nodes_stop_where_the_table_jumps() -> None:
    jump = LatencyModel(
        CostTable.rising([(1, 1e-2), (4, 1.01e-2), (5, 3e-2), (16, 3.1e-2)]), CostTable.line(0, 0, 1e-4)
    )
    nodes = chains(4)
    (found,) = best_trees(nodes, numpy.array([[0.9, 0.8, 0.7, 0.6]]), numpy.ones(1), costs_of(jump, nodes, 1), 100.0)
    assert found.shape.nodes == 3
    both = best_trees(nodes, 0.5 ** numpy.full((2, 4), [1, 2, 3, 4]), numpy.ones(2), costs_of(jump, nodes, 2), 100.0)
    assert sum(own.shape.nodes for own in both) == 2


def test_a_row_alone_pays_for_its_passes_and_one_among_many_for_a_share() -> None:
    dear = LatencyModel(TARGET, CostTable.line(0.0, 0.0, 8e-3))
    nodes, gains = chains(1), numpy.array([[0.5]])
    assert not best_trees(nodes, gains, numpy.ones(1), costs_of(dear, nodes, 1), 80.0)[0].shape.depth
    (among,) = best_trees(nodes, gains, numpy.ones(1), costs_of(dear, nodes, 1, times=8), 80.0, times=8)
    assert among.shape.depth == 1
    assert among.seconds == pytest.approx(1e-3 + 1e-3)


def test_a_block_costs_one_pass_by_the_deepest_row() -> None:
    block = LatencyModel(TARGET, CostTable.line(0.0, 1e-3, 5e-3), drafts_block=True)
    nodes, gains = chains(3), numpy.array([[0.9, 0.8, 0.7], [0.9, 0.1, 0.0]])
    found = best_trees(nodes, gains, numpy.ones(2), costs_of(block, nodes, 2), 60.0)
    assert [own.shape.depth for own in found] == [3, 2]
    assert sum(own.seconds for own in found) == pytest.approx(5 * 1e-3 + 5e-3 + 6 * 1e-3)


def test_a_source_without_a_model_costs_the_same_whatever_it_drafts() -> None:
    free = LatencyModel(TARGET, None, draft_free_s=2e-4)
    found = best_trees(chains(2), numpy.full((2, 2), 0.9), numpy.ones(2), costs_of(free, chains(2), 2), 50.0)
    assert sum(own.seconds for own in found) == pytest.approx(4e-3 + 2e-4)


def test_a_row_has_its_best_nodes_as_far_as_there_is_room() -> None:
    gains = numpy.array([[0.5, 0.2, 0.3], [0.1, 0.3, 0.2]])
    assert within(gains, [2, 3]).tolist() == [[0.5, 0.0, 0.3], [0.1, 0.3, 0.2]]
    assert within(gains, [3, 3]) is gains


def test_nothing_is_drafted_that_nobody_may_have() -> None:
    nodes = chains(2)
    assert best_trees(nodes, numpy.zeros((2, 2)), numpy.ones(2), costs_of(COSTS, nodes, 2), 50.0) == (Drafted(),) * 2
