"""Trees that policies name."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.serving.base.fixed import FixedTree
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.baselines.by_name import named_controller
from distillspec.serving.baselines.tree_names import tree_settings


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("topk-3-2", ("topk", [3, 2], 2, 32)),
        ("dynamic-8", ("dynamic", [], 4, 8)),
        ("dynamic-2", ("dynamic", [], 2, 2)),
        ("medusa-12", ("medusa", [], 4, 12)),
        ("fork-2x4", ("fork", [2], 4, 32)),
    ],
)
def test_a_name_says_what_the_engines_settings_would(name: str, wanted: tuple[Any, ...]) -> None:
    found = tree_settings(name, EngineConfig(max_slots=3, lengths="step", max_time_per_token_s=0.1))
    assert found is not None
    assert (found.tree, found.widths, found.speculation_length, found.nodes) == wanted
    assert (found.controller, found.max_slots) == ("fixed", 3)


@pytest.mark.parametrize("name", ["none", "fixed-3", "goodput", "tree-3-2", "topk", "topk-0", "dynamic-0", "fork-2"])
def test_other_names_are_no_trees(name: str) -> None:
    assert tree_settings(name, EngineConfig()) is None


def test_widths_of_the_same_kind_bound_a_tree_of_so_many_nodes() -> None:
    own = EngineConfig(tree="dynamic", widths=[3, 2, 2])
    of_widths = {name: tree_settings(name, own) for name in ("dynamic-8", "dynamic-2", "medusa-8")}
    assert {name: each.widths for name, each in of_widths.items() if each} == {
        "dynamic-8": [3, 2, 2],
        "dynamic-2": [3, 2],
        "medusa-8": [],
    }


@pytest.mark.parametrize(
    ("name", "shape"),
    [("topk-3-2", TreeShape.full((3, 2))), ("fork-2x3", TreeShape.full((2, 1, 1)))],
)
def test_controllers_draft_the_shape(name: str, shape: TreeShape) -> None:
    controller = named_controller(name, 4, None)
    assert isinstance(controller, FixedTree)
    assert controller.shape == shape


@pytest.mark.parametrize("name", ["dynamic-9", "medusa-9"])
def test_the_best_nodes_are_as_many_as_the_name_says(name: str) -> None:
    controller = named_controller(name, 4, None)
    assert isinstance(controller, FixedTree)
    assert (controller.shape.nodes, controller.shape.depth) == (9, 4)


@pytest.mark.parametrize("name", ["topk-4-4-2", "fork-9x4"])
def test_trees_of_more_tokens_than_the_engine_allows_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"policy {name}: tree=.* above nodes=32; give nodes="):
        tree_settings(name, EngineConfig())
