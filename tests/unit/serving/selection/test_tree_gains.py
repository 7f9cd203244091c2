"""Trees by the chance of a token: those that the planner grows where nodes cost alike."""

from __future__ import annotations

import numpy
import pytest

from distillspec.serving.base.candidates import candidates
from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.serving.costs.known import KnownTrees
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.best_trees import best_trees
from distillspec.serving.selection.tree_gains import INTERVALS, NODES, READS, TOKENS, TreeGains

LEVELS = 4
TREES = KnownTrees(candidates((3,) * LEVELS, 24), numpy.tile([0.25, 0.1], (LEVELS, 1)))
ALIKE = numpy.ones(LEVELS)
NODE_S = 1e-3


@pytest.mark.parametrize("chance", [0.25, 0.5, 0.75, 0.875])
@pytest.mark.parametrize("price", [5.0, 60.0, 200.0, 450.0])
def test_it_is_the_planners_tree(chance: float, price: float) -> None:
    """A draft whose passes cost nothing drafts all levels that bring something."""
    latency = LatencyModel(CostTable.line(0.0, NODE_S, 1e-2), CostTable.line(0.0, 0.0, 0.0))
    nodes = TREES.nodes
    costs = DraftedCosts(latency, numpy.zeros(1, dtype=numpy.int64), LEVELS, nodes=len(nodes))
    own = numpy.full((1, LEVELS, 1), chance)
    chances = numpy.concatenate([own, (1 - own) * TREES.shares[None]], 2)
    (grown,) = best_trees(nodes, nodes.survival(numpy.minimum.accumulate(chances, 2)), numpy.ones(1), costs, price)
    found = TreeGains(TREES, ALIKE, price * NODE_S).at(chance)
    assert found[TOKENS, -1] == pytest.approx(grown.tokens)
    assert found[NODES, -1] == grown.shape.nodes
    assert found[READS, -1] == sum(grown.shape.reads)
    depth = grown.shape.depth
    if depth:
        assert found[TOKENS, depth - 1] == pytest.approx(grown.tokens)
        assert depth == 1 or found[TOKENS, depth - 2] < grown.tokens


def test_a_chain_has_a_node_and_a_read_a_level() -> None:
    found = TreeGains(TREES, ALIKE, 0.3).at(0.875)
    assert (found[NODES] == [1, 2, 3, 4]).all()
    assert (found[READS] == [1, 2, 3, 4]).all()
    assert found[TOKENS] == pytest.approx((0.875 ** numpy.arange(1, LEVELS + 1)).cumsum())


def test_between_two_chances_of_the_table_it_is_between_their_trees() -> None:
    gains = TreeGains(TREES, ALIKE, 0.05)
    below, between, above = (gains.at(place / INTERVALS)[TOKENS] for place in (40, 40.5, 41))
    assert between == pytest.approx((below + above) / 2)
    assert (above > below).all()
    assert (gains.at(1.0)[TOKENS] == [1, 2, 3, 4]).all()
    assert (gains.at(1.2) == gains.at(1.0)).all()


def test_positions_have_acceptance_of_their_own() -> None:
    falling = TreeGains(TREES, numpy.array([1.0, 0.5, 0.25, 0.1]), 0.2).at(0.75)
    assert falling[TOKENS] == pytest.approx([0.75, *[0.75 + 0.75 * 0.375] * 3])
    assert falling[NODES].tolist() == falling[READS].tolist() == [1, 2, 2, 2]
