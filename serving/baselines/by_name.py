"""Controllers of comparisons (`distill bench`, `distill simulate`) by name: those of the table, and variants of them.

They are made alike for both, so a controller is the same live and simulated.
"""

from __future__ import annotations

import re
from typing import Any

from distillspec.config.engine import EngineConfig
from distillspec.config.registry import CONTROLLERS
from distillspec.errors import ConfigError
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength, FixedTree
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.baselines.tree_names import TREE_NAMES, tree_settings
from distillspec.serving.control.by_name import ControllerParts, make_controller
from distillspec.serving.costs.latency import LatencyModel

# Variant → the controller and its options, and a line about it.
VARIANTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "goodput-step": ("goodput", {"lengths": "step"}, "one length for all rows of a step, acceptance by request"),
    "goodput-chains": ("goodput", {"tree": "off"}, "chains alone, no siblings"),
    "goodput-global": ("goodput", {"lengths": "global"}, "one length for all rows of a step, one acceptance for all"),
    "smartspec-request": ("smartspec", {"per_request": True}, "smartspec, the acceptance of each request by itself"),
}
CONTROLLER_NAMES: dict[str, str] = {
    "none": "no speculation",
    "fixed-K": "K tokens a row, as in fixed-3",
    "siblings-W-W": "a chain with W tokens at each level, as in siblings-3-2-1",
    "tree-W-W": "W children under every node of each level, as in tree-3-2-1",
    **{name: choice.about for name, choice in CONTROLLERS.items() if name != "fixed"},
    **{name: about for name, (_, _, about) in VARIANTS.items()},
}


FIXED = re.compile(r"none|fixed-(?P<length>\d+)|(?P<grown>siblings|tree)(?P<widths>(-[1-9]\d?)+)")


def named_controller(
    name: str,
    speculation_length: int,
    latency: LatencyModel | None,
    *,
    drafts_with_model: bool = True,
    settings: EngineConfig | None = None,
) -> LengthController:
    """Build a controller for a comparison: a name of the table, of `CONTROLLER_NAMES` or of `TREE_NAMES`.

    Args:
        speculation_length: the most tokens a row drafts where the controller chooses.
        latency: measured step costs, None to learn them.
        settings: trees and whatever else the controller reads, None: the defaults.

    Raises:
        ConfigError: an unknown name, a tree that settings refuse, or a controller that needs costs without them.
    """
    if match := FIXED.fullmatch(name):
        return _fixed(match)
    settings = settings or EngineConfig()
    if tree := tree_settings(name, settings):
        return make_controller("fixed", ControllerParts(tree.speculation_length, settings=tree), {})
    base, options, _ = VARIANTS.get(name, (name, {}, ""))
    if base not in CONTROLLERS or base == "fixed":
        others = [each for each in CONTROLLERS if each not in (*CONTROLLER_NAMES, "fixed")]
        known = ", ".join([*CONTROLLER_NAMES, *TREE_NAMES, *others])
        raise ConfigError(f"policy {name} is not known; use one of {known}")
    if "profile" in CONTROLLERS[base].needs and latency is None:
        raise ConfigError(f"policy {name} needs costs: measure this machine with distill profile")
    parts = ControllerParts(speculation_length, latency, drafts_with_model, settings)
    return make_controller(base, parts, options)


def _fixed(match: re.Match[str]) -> LengthController:
    """Return the controller of a matched name."""
    if match["grown"] is None:
        return FixedLength(int(match["length"] or 0))
    widths = tuple(map(int, match["widths"].split("-")[1:]))
    return FixedTree(TreeShape.spine(widths) if match["grown"] == "siblings" else TreeShape.full(widths))
