"""Length controllers by name: those of `engine.controller`, and variants of them for comparisons.

The table is `distillspec.config.registry.CONTROLLERS`. Comparisons (`distill bench`, `distill simulate`) take its names
and those of `VARIANTS`, so a controller is the same live and simulated.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distillspec.config.engine import CUT, EngineConfig
from distillspec.config.registry import CONTROLLERS, check_options, find
from distillspec.errors import ConfigError
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.control.base import LengthController
from distillspec.serving.control.candidates import candidates, shape_of
from distillspec.serving.control.fixed import FixedLength, FixedTree
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.smartspec import SmartSpecController
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
    "tree-W-W": "W children under every node of each level, as in tree-4-2-2-1",
    **{name: choice.about for name, choice in CONTROLLERS.items() if name != "fixed"},
    **{name: about for name, (_, _, about) in VARIANTS.items()},
}


FIXED = re.compile(r"none|fixed-(?P<length>\d+)|(?P<grown>siblings|tree)(?P<widths>(-[1-9]\d?)+)")


@dataclass(frozen=True)
class ControllerParts:
    """Parts that a new controller is made from."""

    speculation_length: int  # the most tokens a row may draft
    latency: LatencyModel | None = None  # measured costs, None to learn them
    drafts_with_model: bool = True  # False: proposals cost next to nothing
    settings: EngineConfig = field(default_factory=EngineConfig)


def make_controller(name: str, parts: ControllerParts, options: Mapping[str, Any]) -> LengthController:
    """Build a new controller by its name in the table. Controllers learn, so they are not shared.

    Raises:
        ConfigError: an unknown name or option.
    """
    make = find("controller", name, CONTROLLERS).load()
    check_options("controller_options", name, make, options)
    controller: LengthController = make(parts, **options)
    return controller


def named_controller(
    name: str,
    speculation_length: int,
    latency: LatencyModel | None,
    *,
    drafts_with_model: bool = True,
    settings: EngineConfig | None = None,
) -> LengthController:
    """Build a controller for a comparison: a name of the table or of `CONTROLLER_NAMES`.

    Args:
        speculation_length: the most tokens a row drafts where the controller chooses.
        latency: measured step costs, None to learn them.
        settings: trees and whatever else the controller reads, None: the defaults.

    Raises:
        ConfigError: an unknown name, or a controller that needs costs without them.
    """
    if match := FIXED.fullmatch(name):
        return _fixed(match)
    base, options, _ = VARIANTS.get(name, (name, {}, ""))
    if base not in CONTROLLERS or base == "fixed":
        known = [*CONTROLLER_NAMES, *(each for each in CONTROLLERS if each not in (*CONTROLLER_NAMES, "fixed"))]
        raise ConfigError(f"policy {name} is not known; use one of {', '.join(known)}")
    if "profile" in CONTROLLERS[base].needs and latency is None:
        raise ConfigError(f"policy {name} needs costs: measure this machine with distill profile")
    parts = ControllerParts(speculation_length, latency, drafts_with_model, settings or EngineConfig())
    return make_controller(base, parts, options)


def _fixed(match: re.Match[str]) -> LengthController:
    """Return the controller of a matched name."""
    if match["grown"] is None:
        return FixedLength(int(match["length"] or 0))
    widths = tuple(map(int, match["widths"].split("-")[1:]))
    return FixedTree(TreeShape.spine(widths) if match["grown"] == "siblings" else TreeShape.full(widths))


def make_fixed(parts: ControllerParts) -> LengthController:
    """Draft the tree that settings name for every row. Without widths it is a chain of `speculation_length` tokens.

    With several proposers each drafts one.
    """
    settings, most = parts.settings, parts.speculation_length
    sources = max(1, len(settings.proposers))
    if settings.chosen_tree in CUT and most:
        return FixedTree(shape_of(candidates(settings.most_widths(most), settings.nodes).paths), sources)
    if (settings.widths or sources > 1) and most:
        return FixedTree(TreeShape.full(settings.most_widths(most) if settings.widths else (1,) * most), sources)
    return FixedLength(most)


def make_goodput(parts: ControllerParts, lengths: str | None = None, tree: str | None = None) -> GoodputController:
    """Maximise goodput. `lengths` and `tree` replace the settings."""
    settings = parts.settings if tree is None else replace(parts.settings, tree=tree, widths=[])
    widths = settings.most_widths(parts.speculation_length)
    return GoodputController(
        parts.speculation_length,
        parts.latency,
        lengths=lengths or settings.lengths,
        drafts_with_model=parts.drafts_with_model,
        trees=candidates(widths, settings.nodes) if max(widths, default=1) > 1 else None,
        max_time_per_token_s=settings.max_time_per_token_s,
    )


def make_smartspec(parts: ControllerParts, per_request: bool = False, max_wait_s: float = 1.0) -> SmartSpecController:
    """Follow the paper's algorithms."""
    assert parts.latency is not None, "EngineConfig and named_controller ask for costs"
    latency = parts.latency if parts.drafts_with_model else replace(parts.latency, draft=None)
    gated = latency.draft is not None and parts.settings.draft_confidence > 0
    return SmartSpecController(
        parts.speculation_length, latency, per_request=per_request, gated=gated, max_wait_s=max_wait_s
    )
