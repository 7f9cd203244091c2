"""Nodes of trees: their order, their survival, and the shapes they make."""

from __future__ import annotations

from collections.abc import Iterator

import numpy
import pytest

from distillspec.serving.base.candidates import Path, best_tree, candidates, chains, shape_of
from distillspec.serving.base.shape import TreeShape


def test_parents_and_elder_siblings_come_first() -> None:
    nodes = candidates((3, 3, 2, 2), 24)
    assert len(nodes) == 24
    for place, path in enumerate(nodes.paths):
        before = set(nodes.paths[:place])
        assert len(path) == 1 or path[:-1] in before
        assert path[-1] == 0 or (*path[:-1], path[-1] - 1) in before
        assert nodes.parents[place] == (nodes.paths.index(path[:-1]) if len(path) > 1 else -1)


def test_the_chain_is_always_there_and_the_widest_hopes_come_next() -> None:
    assert candidates((3, 3, 3, 3), 4).paths == chains(4).paths == [(0,) * depth for depth in range(1, 5)]
    assert candidates((2, 2), 3).paths == [(0,), (1,), (0, 0)]
    assert candidates((3, 1), 2).depth == 2
    assert len(candidates((2, 2), 100)) == 6


def test_many_levels_take_no_time() -> None:
    assert len(candidates((8,) * 16, 32)) == 32
    assert len(candidates((3,) * 40, 32)) == 40, "a chain of all levels is always among them"


def test_survival_is_the_product_of_chances_along_the_path() -> None:
    nodes = candidates((3, 2, 2), 18)
    chances = numpy.random.default_rng(0).random((2, 3, 3))
    found = nodes.survival(chances)
    for place, path in enumerate(nodes.paths):
        wanted = numpy.prod([chances[:, depth, rank] for depth, rank in enumerate(path)], 0)
        assert found[:, place] == pytest.approx(wanted)


def test_sets_of_nodes_make_shapes() -> None:
    nodes = candidates((3, 2, 1), 15)
    assert nodes.shape(numpy.ones(15, dtype=bool)) == TreeShape.full((3, 2, 1))
    assert nodes.shape(nodes.spine) == TreeShape.full((1, 1, 1))
    assert nodes.shape(numpy.zeros(15, dtype=bool)) == TreeShape()
    assert shape_of([(0,), (1,), (1, 0)]) == TreeShape(((2,), (0, 1)))


def grown(tree: frozenset[Path], widths: tuple[int, ...]) -> Iterator[frozenset[Path]]:
    """Yield the trees of one more node."""
    for parent in [(), *tree]:
        rank = sum(path[:-1] == parent for path in tree)
        if len(parent) < len(widths) and rank < widths[len(parent)]:
            yield tree | {(*parent, rank)}


@pytest.mark.parametrize("nodes", [1, 4, 7])
@pytest.mark.parametrize("seed", range(3))
def test_the_best_tree_has_the_most_expected_tokens_of_all(seed: int, nodes: int) -> None:
    widths = (3, 2, 2)
    chances = -numpy.sort(-numpy.random.default_rng(seed).random((3, 3)), 1)
    every: set[frozenset[Path]] = {frozenset()}
    for _ in range(nodes):
        every = {more for tree in every for more in grown(tree, widths)}

    def expected(tree: frozenset[Path]) -> float:
        return sum(float(numpy.prod([chances[level, rank] for level, rank in enumerate(path)])) for path in tree)

    found = best_tree(widths, nodes, tuple(map(tuple, chances.tolist())))
    assert found == shape_of(list(max(every, key=expected)))


def test_chances_that_were_not_measured_are_typical_and_no_rank_is_above_those_before_it() -> None:
    assert best_tree((2, 2), 4, ((0.9, 0.1), (0.3, 0.2))) == TreeShape(((2,), (2, 0)))
    assert best_tree((2, 2), 3, ((0.9, 0.1), (0.02, 0.9))) == TreeShape(((2,), (1, 0))), "0.02 bounds both"
    assert best_tree((1, 2), 2, ((0.9,),)) == TreeShape(((1,), (1,)))
    assert best_tree((4,), 4, ((0.5, 0.2),)) == TreeShape(((4,),))
    assert len(candidates((3, 2), 4, ((0.9, 0.02, 0.01), (0.8, 0.7)))) == 4
    assert candidates((3, 2), 3, ((0.9, 0.02, 0.01), (0.8, 0.7))).paths == [(0,), (0, 0), (0, 1)]
