"""Weighted sum of losses, as the configuration writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from distillspec.config.registry import LOSSES
from distillspec.errors import ConfigError
from distillspec.losses.registry import check_loss, needs_target


@dataclass(frozen=True)
class LossTerm:
    """One loss of a mix: `weight` multiplies it, `params` are its own (`beta`, `eta`, …)."""

    name: str
    weight: float = 1.0
    params: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_loss(self.name, dict(self.params))
        if not isinstance(self.weight, (int, float)) or isinstance(self.weight, bool):
            raise ConfigError(f"the weight of loss {self.name} must be a number, not {self.weight!r}")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(f"the weight of loss {self.name} must be finite and >= 0, not {self.weight}")


@dataclass(frozen=True)
class LossMix:
    """Σ weight · loss over distinct losses."""

    terms: tuple[LossTerm, ...]

    def __post_init__(self) -> None:
        names = [term.name for term in self.terms]
        if not names:
            raise ConfigError("the loss mix is empty; give at least one loss a weight above 0")
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"loss {name} appears twice in the mix; give it one weight")

    @classmethod
    def parse(cls, config: Mapping[str, Any]) -> LossMix:
        """Read `{"fkl": 0.7, "ce": 0.3}` or `{"jsd": {"weight": 1, "beta": 0.1}}`. Weight 0 leaves a loss out.

        Raises:
            ConfigError: an unknown loss or parameter, an impossible value, or nothing left.
        """
        terms = [_term(name, value) for name, value in config.items()]
        return cls(tuple(term for term in terms if term.weight > 0))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)

    @property
    def needs_teacher(self) -> bool:
        """True when any loss compares the draft with the target."""
        return any(needs_target(LOSSES[name]) for name in self.names)

    @property
    def distribution_losses(self) -> tuple[str, ...]:
        """Names of the losses that tokens drawn from the target cannot feed."""
        return tuple(name for name in self.names if "distribution" in LOSSES[name].needs)

    @property
    def needs_distribution(self) -> bool:
        """True if a loss compares whole distributions: tokens drawn from the target are not enough."""
        return bool(self.distribution_losses)

    @property
    def needs_draft_samples(self) -> bool:
        """True when any loss learns only from text that the draft wrote."""
        return any("draft_text" in LOSSES[name].needs for name in self.names)


def _term(name: str, value: Any) -> LossTerm:
    if not isinstance(value, Mapping):
        return LossTerm(name, value)
    params = dict(value)
    return LossTerm(name, params.pop("weight", 1.0), params)
