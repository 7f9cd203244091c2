"""Losses by name: the dense references, and one entry for every kind of input."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses.acceptance import (
    acceptance,
    adaptive_hybrid,
    check_eta,
    lk,
    lk_hybrid,
    negative_log_acceptance,
)
from distillspec.losses.divergences import (
    check_beta,
    check_kl,
    fkl,
    forward_kl,
    jensen_shannon,
    jensen_shannon_and_kl,
    jsd,
    jsd_kl,
    reverse_kl,
    rkl,
    total_variation,
    tvd,
)
from distillspec.losses.inputs import LossInputs, PerTokenLoss
from distillspec.losses.sampled import hard_labels, policy_gradient, sampled_acceptance, target_samples

# name -> dense reference (draft_logits [N, V], target_logits [N, V], *, temperature=1.0, **params) -> [N]
LOSSES: dict[str, Callable[..., Tensor]] = {
    "fkl": fkl,
    "rkl": rkl,
    "jsd": jsd,
    "jsd_kl": jsd_kl,
    "tvd": tvd,
    "lk": lk,
    "lk_hybrid": lk_hybrid,
}

_FORMULAS: dict[str, Callable[..., Tensor]] = {
    "fkl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "jsd_kl": jensen_shannon_and_kl,
    "tvd": total_variation,
    "lk": negative_log_acceptance,
    "lk_hybrid": adaptive_hybrid,
}
_ON_LABELS: dict[str, Callable[[LossInputs], PerTokenLoss]] = {"ce": hard_labels, "tvdpp": policy_gradient}
_PARAMETER_CHECKS: dict[str, Callable[[Any, str], None]] = {"beta": check_beta, "eta": check_eta, "kl": check_kl}

LOSS_NAMES: tuple[str, ...] = (*LOSSES, *_ON_LABELS)


def per_token_loss(name: str, inputs: LossInputs, **params: Any) -> PerTokenLoss:
    """The loss `name` at every position of `inputs`, with whatever view of the target they hold.

    Equals `LOSSES[name]` where that exists and the logits are dense. Raises `NonFiniteLogits` (ValueError)
    naming the loss and position for NaN or +inf, ConfigError for an unknown name or parameter and for
    inputs that lack what the loss needs.
    """
    check_loss(name, params)
    inputs.require_finite(name)
    if name == "ce":
        return hard_labels(inputs)
    _require_target(name, inputs)
    if name == "tvdpp":
        return policy_gradient(inputs)
    if not inputs.has_pair:
        return target_samples(inputs)
    values = _FORMULAS[name](inputs.pair, **params)
    return PerTokenLoss(values, torch.ones_like(values, dtype=torch.bool), inputs.pair.outside)


def acceptance_of(inputs: LossInputs) -> Tensor | None:
    """α `[N]` without gradient: exact for a live target, an upper bound for a `topk` signal (its tail is one
    bucket), an unbiased estimate for one with draws from its tail and for a `sampled` one, None without any."""
    if inputs.has_pair:
        return acceptance(inputs.pair).detach()
    return None if inputs.signal is None else sampled_acceptance(inputs)


def check_loss(name: str, params: dict[str, Any]) -> None:
    """Raise ConfigError for a loss or a parameter that does not exist, and for a value it cannot have."""
    if name not in LOSS_NAMES:
        raise ConfigError(f"unknown loss {name!r}; known: {', '.join(LOSS_NAMES)}")
    known = [] if name in _ON_LABELS else list(inspect.signature(_FORMULAS[name]).parameters)[1:]
    for param in params:
        if param not in known:
            raise ConfigError(f"loss {name} has no parameter {param!r}; it has: {', '.join(known) or 'none'}")
        _PARAMETER_CHECKS[param](params[param], name)


def _require_target(name: str, inputs: LossInputs) -> None:
    if inputs.target_logits is None and inputs.signal is None:
        raise ConfigError(f"the loss {name} needs a target: live logits or a recorded signal")
    if not inputs.has_pair and name != "fkl":
        raise ConfigError(
            f"the loss {name} needs the target's distribution, but the signal holds sampled tokens; "
            "use fkl, record a topk signal, or train with a live teacher"
        )
