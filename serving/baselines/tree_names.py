"""Trees by name in comparisons, as in `topk-3-2`: what `engine.tree`, `engine.widths` and `engine.nodes` would say."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError

TREE_NAMES = {
    "topk-W-W": "a tree of the most probable tokens, W under every node of each level, as in topk-3-2",
    "dynamic-N": "the N nodes of highest confidence (EAGLE-2), as in dynamic-8",
    "medusa-N": "N combinations of a Medusa draft's tokens, as in medusa-8",
    "fork-WxD": "W chains of D tokens side by side, as in fork-2x4",
}
_NAME = re.compile(
    r"topk(?P<widths>(-[1-9]\d?)+)|(?P<cut>dynamic|medusa)-(?P<nodes>[1-9]\d*)"
    r"|fork-(?P<chains>[1-9]\d?)x(?P<levels>[1-9]\d?)"
)


def tree_settings(name: str, settings: EngineConfig) -> EngineConfig | None:
    """Return the engine's settings for the tree that a name says, None for a name of something else.

    `dynamic` and `medusa` have at most `settings.speculation_length` levels, and widths of the settings if these are of
    such trees.

    Raises:
        ConfigError: the engine could not have the tree, such as one of more than `settings.nodes` tokens.
    """
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    changes = {"profile": None, "lengths": "request", "max_time_per_token_s": None, **_shape(match, settings)}
    try:
        return replace(settings, controller="fixed", controller_options={}, **changes)
    except ConfigError as error:
        raise ConfigError(f"policy {name}: {error}") from error


def _shape(match: re.Match[str], settings: EngineConfig) -> dict[str, Any]:
    if match["widths"]:
        widths = [int(width) for width in match["widths"].split("-")[1:]]
        return {"tree": "topk", "widths": widths, "speculation_length": len(widths)}
    if match["chains"]:
        return {"tree": "fork", "widths": [int(match["chains"])], "speculation_length": int(match["levels"])}
    nodes = int(match["nodes"])
    widths = settings.widths if settings.tree == match["cut"] else []
    levels = min(nodes, settings.speculation_length)
    return {"tree": match["cut"], "nodes": nodes, "widths": widths[:levels], "speculation_length": levels}
