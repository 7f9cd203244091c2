"""Losses by name: the dense references, and one entry for every kind of input.

The table of losses is `distillspec.config.registry.LOSSES`. Its code is imported when a loss is used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from distillspec.config.registry import LOSSES as TABLE
from distillspec.config.registry import LossChoice, options_of
from distillspec.errors import ConfigError
from distillspec.losses.acceptance_direct import acceptance, check_eta
from distillspec.losses.divergences import check_beta, check_kl
from distillspec.losses.inputs import LossInputs, PerTokenLoss
from distillspec.losses.pairs import dense_pair
from distillspec.losses.sampled import sampled_acceptance, target_samples

Formula = Callable[..., Tensor]
_PARAMETER_CHECKS: dict[str, Callable[[Any, str], None]] = {"beta": check_beta, "eta": check_eta, "kl": check_kl}


class _DenseReferences(Mapping[str, Formula]):
    """Dense references by name, of every loss that compares distributions."""

    def __getitem__(self, name: str) -> Formula:
        choice = TABLE[name]
        if "labels" in choice.needs:
            raise KeyError(name)
        return replace(choice, code=choice.reference).load() if choice.reference else _dense(name, choice.load())

    def __iter__(self) -> Iterator[str]:
        return (name for name, choice in TABLE.items() if "labels" not in choice.needs)

    def __len__(self) -> int:
        return len(list(iter(self)))


# name -> dense reference (draft_logits [N, V], target_logits [N, V], *, temperature=1.0, **params) -> [N] float32
LOSSES: Mapping[str, Formula] = _DenseReferences()
LOSS_NAMES: tuple[str, ...] = tuple(TABLE)


def per_token_loss(name: str, inputs: LossInputs, **params: Any) -> PerTokenLoss:
    """Return the loss `name` at every position of `inputs`, for the view of the target that they hold.

    Equals `LOSSES[name]` where that exists and the logits are dense.

    Raises:
        NonFiniteLogits: NaN or +inf (a ValueError). The message names the loss and the position.
        ConfigError: the name or a parameter is unknown, or `inputs` lack something that the loss needs.
    """
    check_loss(name, params)
    inputs.require_finite(name)
    choice = TABLE[name]
    _require_target(name, choice, inputs)
    if "labels" in choice.needs:
        return choice.load()(inputs, **params)
    if not inputs.has_pair:
        return target_samples(inputs)
    values = choice.load()(inputs.pair, **params)
    return PerTokenLoss(values, torch.ones_like(values, dtype=torch.bool), inputs.pair.outside)


def acceptance_of(inputs: LossInputs) -> Tensor | None:
    """Return α `[N]` without gradient, or None without a target.

    It is exact for a live target. It is an upper bound for a `topk` signal, whose tail is one bucket, and an unbiased
    estimate for one with draws from its tail and for a `sampled` signal.
    """
    if inputs.has_pair:
        return acceptance(inputs.pair).detach()
    return None if inputs.signal is None else sampled_acceptance(inputs)


def check_loss(name: str, params: Mapping[str, Any]) -> None:
    """Raise ConfigError for a loss or a parameter that does not exist, and for a value it cannot have."""
    if name not in TABLE:
        raise ConfigError(f"unknown loss {name!r}; known: {', '.join(TABLE)}")
    known = options_of(TABLE[name].load())
    for param, value in params.items():
        if param not in known:
            raise ConfigError(f"loss {name} has no parameter {param!r}; it has: {', '.join(known) or 'none'}")
        if param in _PARAMETER_CHECKS:
            _PARAMETER_CHECKS[param](value, name)


def _dense(name: str, formula: Formula) -> Formula:
    """Make the dense reference of a loss from its formula."""

    def reference(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0, **params: Any) -> Tensor:
        return formula(dense_pair(draft_logits, target_logits, temperature, name), **params)

    reference.__name__, reference.__doc__ = name, formula.__doc__
    return reference


def _require_target(name: str, choice: LossChoice, inputs: LossInputs) -> None:
    if not needs_target(choice):
        return
    if inputs.target_logits is None and inputs.signal is None:
        raise ConfigError(f"the loss {name} needs a target: live logits or a recorded signal")
    if not inputs.has_pair and "distribution" in choice.needs:
        raise ConfigError(
            f"the loss {name} needs the target's distribution, but the signal holds sampled tokens; "
            "use fkl, record a topk signal, or train with a live teacher"
        )


def needs_target(choice: LossChoice) -> bool:
    """True when the loss compares the draft with the target."""
    return "distribution" in choice.needs or "target" in choice.needs
