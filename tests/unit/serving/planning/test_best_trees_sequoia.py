"""The best tree of n nodes is the one that Sequoia's dynamic programme finds (Chen et al. 2024, section 3.1)."""

from __future__ import annotations

from functools import cache

import numpy
import pytest

from distillspec.serving.base.candidates import candidates
from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.planning.best_trees import best_trees

DEPTH, WIDTH = 4, 4
TOO_DEAR_S = 1e4


def most_tokens(accepted: tuple[float, ...], nodes: int) -> float:
    """The most tokens, the target's own among them, of a tree with so many drafted nodes.

    `accepted`: P(the child of each rank is accepted | its parent is), those of its elder siblings excluded.
    """

    @cache
    def below(budget: int, depth: int) -> float:
        """Behind an accepted node: 1 for the token that follows it, and what its subtrees add."""
        return 1.0 if depth == 0 else 1.0 + children(budget, 0, depth)

    @cache
    def children(budget: int, rank: int, depth: int) -> float:
        if budget == 0 or rank == len(accepted):
            return 0.0
        own = (
            accepted[rank] * below(taken - 1, depth - 1) + children(budget - taken, rank + 1, depth)
            for taken in range(1, budget + 1)
        )
        return max(0.0, *own)

    return below(nodes, DEPTH)


@pytest.mark.parametrize("nodes", [1, 2, 3, 5, 8, 12, 20])
@pytest.mark.parametrize("seed", range(4))
def test_a_budget_of_nodes_is_spent_as_by_sequoia(nodes: int, seed: int) -> None:
    """Passes of up to 1 + `nodes` tokens cost the same, larger ones far too much, and drafting nothing."""
    shares = -numpy.sort(-numpy.random.default_rng(seed).random(WIDTH))
    accepted = shares / shares.sum() * 0.9
    trees = candidates((WIDTH,) * DEPTH, 340)  # the full tree
    chances = numpy.broadcast_to(accepted, (1, DEPTH, WIDTH))
    target = CostTable(((1.0, 1.0), (1.0 + nodes, 1.0), (2.0 + nodes, TOO_DEAR_S)))
    costs = DraftedCosts(LatencyModel(target, None, 0.0), numpy.zeros(1, dtype=numpy.int64), DEPTH, nodes=len(trees))
    (best,) = best_trees(trees, trees.survival(chances), numpy.ones(1), costs, price=1.0)
    assert best.shape.nodes == nodes
    assert 1 + best.tokens == pytest.approx(most_tokens(tuple(accepted.tolist()), nodes))
