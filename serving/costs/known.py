"""Costs of steps that a length controller knows, or may be given."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.wrapped import innermost
from distillspec.serving.costs.latency import LatencyModel


@runtime_checkable
class TakesCosts(Protocol):
    """A length controller that predicts times and can go on from measured costs."""

    def use_costs(self, latency: LatencyModel) -> None: ...


def known_costs(controller: LengthController) -> LatencyModel | None:
    """Return the controller's costs of steps, measured or from a profile, None if it has none."""
    return getattr(innermost(controller), "latency", None)
