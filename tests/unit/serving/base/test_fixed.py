"""Fixed shapes of several sources in one tree."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.base.fixed import FixedLength, FixedTree, joined
from distillspec.serving.base.rows import BatchView, Option, RowView
from distillspec.serving.base.shape import PlannedTree, TreeShape, chain_shape
from distillspec.serving.control.goodput import GoodputController

ROW = RowView("x", 9, 4, source="maths", others=(Option(1, source="sql"), Option(0, source="chat")))


@pytest.mark.parametrize(
    ("controller", "shape"),
    [(FixedLength(3), chain_shape(3)), (FixedTree(TreeShape.full((2, 2))), TreeShape.full((2, 2)))],
)
def test_every_source_drafts_the_shape_as_far_as_it_may(controller: FixedLength | FixedTree, shape: TreeShape) -> None:
    found = joined(controller, 3)
    assert (found.speculation_length, found.most_nodes) == (shape.depth, 3 * shape.nodes)
    (row,) = found.plan(BatchView((ROW,))).rows
    assert row.trees == (PlannedTree("maths", shape), PlannedTree("sql", shape.shortened(1)))


def test_shapes_that_change_cannot_be_joined() -> None:
    with pytest.raises(ConfigError, match="need a fixed shape"):
        joined(GoodputController(4), 2)
