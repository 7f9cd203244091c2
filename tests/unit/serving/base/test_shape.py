"""Shapes of trees: full ones, chains with siblings, and what is no tree."""

from __future__ import annotations

import pytest

from distillspec.serving.base.shape import TreeShape, chain_of


def test_a_full_tree_has_as_many_children_everywhere() -> None:
    shape = TreeShape.full((3, 2, 1))
    assert shape.levels == ((3,), (2, 2, 2), (1,) * 6)
    assert (shape.depth, shape.nodes, shape.widths, shape.is_spine) == (3, 15, (3, 2, 1), False)
    assert shape.reads == (1, 3, 6)
    assert TreeShape.full((1, 1)) == TreeShape.spine((1, 1)) == chain_of(2)[0].shape


def test_only_the_first_of_siblings_has_children_on_a_spine() -> None:
    shape = TreeShape.spine((3, 1, 2))
    assert shape.levels == ((3,), (1, 0, 0), (2,))
    assert (shape.depth, shape.nodes, shape.widths, shape.is_spine) == (3, 6, (3, 1, 2), True)
    assert shape.reads == (1, 1, 1)
    assert shape.shortened(1) == TreeShape.spine((3,))
    assert shape.shortened(5) is shape
    assert chain_of(0) == ()


@pytest.mark.parametrize("levels", [((0,),), ((2,), (1,)), ((1,), (-1,)), ((2,), (1, 1), (0, 0))])
def test_levels_that_make_no_tree_are_refused(levels: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ValueError, match="children"):
        TreeShape(levels)


def test_nodes_with_parents_make_a_shape() -> None:
    """Nodes 0 and 3 are first; 1 and 4 are children of 0; 2 is one of 1, and 5 one of 3."""
    assert TreeShape.of_parents((-1, 0, 1, -1, 0, 3)) == TreeShape(((2,), (2, 1), (1, 0, 0)))
    assert TreeShape.of_parents(()) == TreeShape()
