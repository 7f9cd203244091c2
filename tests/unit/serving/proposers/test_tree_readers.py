"""Readers of trees, as numbers for the call that grows them."""

from __future__ import annotations

from distillspec.serving.base.shape import TreeShape
from distillspec.serving.proposers.tree_readers import Reader, call_plan, tree_readers

UNEVEN = TreeShape(((2,), (1, 2), (0, 1, 1)))  # nodes 0, 1 | 2, 3, 4 | 5, 6


def test_readers_see_their_ancestors_and_themselves() -> None:
    assert tree_readers(UNEVEN) == (
        (Reader(-1, -1, 0, 2, 0),),
        (Reader(0, 0, 2, 1, 0b1), Reader(1, 0, 3, 2, 0b10)),
        (Reader(3, 2, 5, 1, 0b110), Reader(4, 2, 6, 1, 0b1010)),
    )
    assert tree_readers(TreeShape()) == ()


def test_a_plan_goes_level_by_level_and_row_by_row() -> None:
    shapes = (TreeShape.full((1, 1)), UNEVEN)
    plan = call_plan(shapes)
    assert (plan.starts, plan.readers.nodes, plan.level) == ((0, 2), 9, 3)
    assert plan.places == ((0, 2), (1, 3, 4, 5, 6))
    assert plan.draws == (5, 2)
    assert plan.readers.levels.tolist() == [0, 2, 5, 7]
    assert plan.readers.numbers.tolist() == [
        # row, token, reader before, first child, children, number, seen
        [0, -1, -1, 0, 1, 0, 0],
        [1, -1, -1, 2, 2, 0, 0],
        [0, 0, 0, 1, 1, 1, 0b1],
        [1, 2, 1, 4, 1, 1, 0b1],
        [1, 3, 1, 5, 2, 2, 0b10],
        [1, 5, 4, 7, 1, 3, 0b110],
        [1, 6, 4, 8, 1, 4, 0b1010],
    ]


def test_the_last_bit_of_a_word_is_its_sign() -> None:
    deep = call_plan((TreeShape.full((1,) * 65),)).readers.numbers
    assert deep[63:, 6].tolist() == [2**63 - 1, -1]
