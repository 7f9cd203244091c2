"""Costs of steps that a length controller knows, or may be given, and the trees that it may plan."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

from distillspec.serving.base.candidates import Candidates
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.wrapped import innermost
from distillspec.serving.costs.latency import LatencyModel
from distillspec.types import Floats


class KnownTrees(NamedTuple):
    """Trees that a controller may plan for a draft."""

    nodes: Candidates
    shares: Floats  # `[levels, width − 1]`, see `AcceptanceEstimate.sibling_shares`


@runtime_checkable
class TakesCosts(Protocol):
    """A length controller that predicts times and can go on from measured costs."""

    def use_costs(self, latency: LatencyModel) -> None: ...


def known_costs(controller: LengthController) -> LatencyModel | None:
    """Return the controller's costs of steps, measured or from a profile, None if it has none."""
    return getattr(innermost(controller), "latency", None)


def known_trees(controller: LengthController) -> KnownTrees | None:
    """Return the trees that the controller chooses from, None where it plans chains, or one shape for all rows."""
    own = innermost(controller)
    nodes, acceptance = getattr(own, "trees", None), getattr(own, "acceptance", None)
    if not isinstance(nodes, Candidates) or acceptance is None or acceptance.width < 2:
        return None
    return KnownTrees(nodes, acceptance.sibling_shares())
