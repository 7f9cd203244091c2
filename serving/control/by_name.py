"""Length controllers by name: those of `engine.controller`, in the table `distillspec.config.registry.CONTROLLERS`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from distillspec.config.engine import CUT, EngineConfig
from distillspec.config.registry import CONTROLLERS, check_options, find
from distillspec.serving.base.candidates import RankChances, best_tree, candidates, shape_of
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength, FixedTree
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel


@dataclass(frozen=True)
class ControllerParts:
    """Parts that a new controller is made from."""

    speculation_length: int  # the most tokens a row may draft
    latency: LatencyModel | None = None  # measured costs, None to learn them
    drafts_with_model: bool = True  # False: proposals cost next to nothing
    settings: EngineConfig = field(default_factory=EngineConfig)
    chances: RankChances = ()  # of a Medusa tree, measured on held-out text


def make_controller(name: str, parts: ControllerParts, options: Mapping[str, Any]) -> LengthController:
    """Build a new controller by its name in the table. Controllers learn, so they are not shared.

    Raises:
        ConfigError: an unknown name or option.
    """
    make = find("controller", name, CONTROLLERS).load()
    check_options("controller_options", name, make, options)
    controller: LengthController = make(parts, **options)
    return controller


def make_fixed(parts: ControllerParts) -> LengthController:
    """Draft the tree that settings name for every row. Without widths it is a chain of `speculation_length` tokens.

    With several proposers each drafts one.
    """
    settings, most = parts.settings, parts.speculation_length
    sources = max(1, len(settings.proposers))
    if settings.chosen_tree in CUT and most:
        widths = settings.most_widths(min(most, settings.nodes))
        if parts.chances:
            return FixedTree(best_tree(widths, settings.nodes, parts.chances), sources)
        return FixedTree(shape_of(candidates(widths, settings.nodes).paths), sources)
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
        trees=candidates(widths, settings.nodes, parts.chances) if max(widths, default=1) > 1 else None,
        max_time_per_token_s=settings.max_time_per_token_s,
    )
