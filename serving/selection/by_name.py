"""Selections by the names of `engine.selection`, which are in `distillspec.config.registry.SELECTIONS`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from distillspec.config.registry import SELECTIONS, check_options, find
from distillspec.errors import ConfigError
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength, FixedTree
from distillspec.serving.base.wrapped import innermost
from distillspec.serving.costs.known import known_trees
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.selection.base import MOST_LEVELS, Selection, SelectionParts
from distillspec.serving.selection.selecting import SelectingController


def make_selection(name: str, parts: SelectionParts, options: Mapping[str, Any]) -> Selection:
    """Build a new selection by its name in the table. Selections learn, so they are not shared.

    Raises:
        ConfigError: an unknown name or option.
    """
    make = find("selection", name, SELECTIONS).load()
    check_options("selection_options", name, make, options)
    selection: Selection = make(parts, **options)
    return selection


def with_selection(
    inside: LengthController,
    name: str,
    drafts: Sequence[str],
    options: Mapping[str, Any] | None = None,
    *,
    seed: int = 0,
    expected: Mapping[str, float] | None = None,
    free: Sequence[str] = (),
) -> SelectingController:
    """Return a controller that gives each row one of several drafts, and its length by the controller inside.

    Args:
        drafts: their names.
        expected: α of drafts by their own evaluation, as far as it is known.
        free: sources without a model, members beside the drafts.
    """
    most, is_fixed = inside.speculation_length, isinstance(innermost(inside), FixedLength | FixedTree)
    fixed = most or None if is_fixed else None

    def make(latency: Callable[[], LatencyModel]) -> Selection:
        levels, known = most or MOST_LEVELS, expected or {}
        trees = partial(known_trees, inside)
        parts = SelectionParts(tuple(drafts), seed, latency, fixed, levels, known, tuple(free), trees)
        return make_selection(name, parts, options or {})

    return SelectingController(inside, make, free)


def compared_selection(
    inside: LengthController,
    name: str,
    drafts: Sequence[str],
    options: Mapping[str, Any],
    *,
    seed: int = 0,
    expected: Mapping[str, float] | None = None,
    free: Sequence[str] = (),
    costs: LatencyModel | None = None,
) -> SelectingController:
    """Return a controller with a selection for a comparison: a name of the table, or a member's for every request.

    Args:
        costs: measured ones, for a controller inside that knows none.
        inside, name, drafts, options, seed, expected, free: see `with_selection`.

    Raises:
        ConfigError: the name is neither.
    """
    members = (*drafts, *free)
    if name in members:
        name, options = "fixed", {"draft": name}
    elif name not in SELECTIONS:
        known = ", ".join([*SELECTIONS, *members])
        raise ConfigError(f"selections: {name} is no selection and no draft; use some of {known}")
    controller = with_selection(inside, name, drafts, options, seed=seed, expected=expected, free=free)
    controller.costs = costs
    return controller


def check_selection(name: str, options: Mapping[str, Any]) -> None:
    """Raise ConfigError for an unknown name or option, before any model is loaded."""
    check_options("selection_options", name, find("selection", name, SELECTIONS).load(), options)
