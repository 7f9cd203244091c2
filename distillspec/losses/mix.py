"""A weighted sum of losses, as the configuration writes it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from distillspec.errors import ConfigError
from distillspec.losses.registry import check_loss


@dataclass(frozen=True)
class LossTerm:
    """One loss of a mix: `weight` multiplies it, `params` are its own (`beta`, `eta`)."""

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
    def parse(
        cls,
        config: LossMix | str | Mapping[str, Any] | Sequence[Any],
        params: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> LossMix:
        """From `"fkl"`, `{"fkl": 0.7, "ce": 0.3}`, `{"jsd": {"weight": 1, "beta": 0.1}}`, or a list of names,
        LossTerms and `{"name": ..., "weight": ..., **params}`. Weight 0 leaves a loss out.
        `params` adds parameters by loss name, `{"jsd": {"beta": 0.1}}`."""
        if isinstance(config, LossMix):
            terms = list(config.terms)
        elif isinstance(config, str):
            terms = [LossTerm(config)]
        elif isinstance(config, Mapping):
            terms = [_named_term(name, value) for name, value in config.items()]
        else:
            terms = [_listed_term(entry) for entry in config]
        terms = _with_params(terms, params or {})
        return cls(tuple(term for term in terms if term.weight > 0))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(term.name for term in self.terms)

    @property
    def needs_teacher(self) -> bool:
        return any(term.name != "ce" for term in self.terms)

    @property
    def needs_distribution(self) -> bool:
        """Whether tokens drawn from the target are not enough to stand for it."""
        return any(term.name not in ("ce", "fkl") for term in self.terms)

    @property
    def needs_draft_samples(self) -> bool:
        return "tvdpp" in self.names

    @property
    def needs_labels(self) -> bool:
        return "ce" in self.names or "tvdpp" in self.names


def _named_term(name: str, value: Any) -> LossTerm:
    if isinstance(value, Mapping):
        params = dict(value)
        return LossTerm(name, params.pop("weight", 1.0), params)
    return LossTerm(name, value)


def _listed_term(entry: Any) -> LossTerm:
    if isinstance(entry, LossTerm):
        return entry
    if isinstance(entry, str):
        return LossTerm(entry)
    if isinstance(entry, Mapping) and "name" in entry:
        params = dict(entry)
        return _named_term(params.pop("name"), params)
    raise ConfigError(f"a loss in a list is a name or a mapping with `name`, not {entry!r}")


def _with_params(terms: list[LossTerm], params: Mapping[str, Mapping[str, Any]]) -> list[LossTerm]:
    for name in params:
        if name not in [term.name for term in terms]:
            raise ConfigError(f"parameters are given for loss {name!r}, which is not in the mix")
    return [LossTerm(term.name, term.weight, {**term.params, **params.get(term.name, {})}) for term in terms]
