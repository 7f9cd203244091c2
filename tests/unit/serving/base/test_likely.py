"""Nodes that a source names: their first ones, their levels, and their shapes."""

from __future__ import annotations

import pytest

from distillspec.serving.base.likely import LikelyNodes
from distillspec.serving.base.shape import TreeShape

NODES = LikelyNodes("ngram", (0.5, 0.4, 0.3, 0.2, 0.1), (-1, 0, -1, 1, 2), (1, 2, 1, 3, 2))


def test_the_first_nodes_are_a_tree_however_many() -> None:
    assert [NODES.first(count).shape.nodes for count in range(6)] == list(range(6))
    assert NODES.first(3).shape == TreeShape(((2,), (1, 0)))
    assert NODES.first(2) == LikelyNodes("ngram", (0.5, 0.4), (-1, 0), (1, 2))
    assert NODES.first(9) == NODES


def test_expected_tokens_and_the_chance_that_none_is_right() -> None:
    assert NODES.tokens == pytest.approx(1.5)
    assert NODES.missed == pytest.approx(1 - 0.5 - 0.3)
    assert NODES.first(0).missed == 1.0


def test_levels_beyond_a_bound_are_left_out() -> None:
    assert NODES.within(3) is NODES
    assert NODES.within(2) == LikelyNodes("ngram", (0.5, 0.4, 0.3, 0.1), (-1, 0, -1, 2), (1, 2, 1, 2))
    assert NODES.within(0) == LikelyNodes("ngram")
