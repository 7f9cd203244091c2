"""Checks of logits and of sampling policies."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillspec.errors import ConfigError, RunError
from distillspec.types import SamplingPolicy

HOTTEST = 1e30  # beyond this temperature −inf over it, a banned token's, is NaN in float32: 1 / T is 0, or T infinite


class NonFiniteLogits(RunError, ValueError):
    """Logits with NaN, +inf, or a row of nothing but −inf. The message names their owner and the row."""


def bad_row(logits: Tensor, first_position: int = 0) -> str | None:
    """Describe the first row of `logits [..., V]` that defines no distribution, or return None.

    −inf is a zero probability and allowed. NaN, +inf and a row of nothing but −inf are not. Rows are counted from
    `first_position`.
    """
    peaks = logits.detach().amax(-1)
    finite = torch.isfinite(peaks)
    if bool(finite.all()):
        return None
    row = int((~finite).flatten().nonzero()[0])
    peak = float(peaks.flatten()[row])
    what = "NaN" if math.isnan(peak) else "+inf" if peak > 0 else "no finite logit"
    return f"{what} at position {first_position + row}"


def check_logits(logits: Tensor, owner: str) -> None:
    """Raise `NonFiniteLogits`, naming `owner` and the first bad row, if a row defines no distribution."""
    problem = bad_row(logits)
    if problem is not None:
        raise NonFiniteLogits(f"{owner}: {problem}")


def check_policy(policy: SamplingPolicy) -> None:
    """Raise `ConfigError` for a temperature, top-k, top-p or min-p outside its range."""
    if not 0 <= policy.temperature <= HOTTEST:
        raise ConfigError(f"temperature={policy.temperature} must be between 0 (greedy) and {HOTTEST:g}")
    if policy.top_k < 0:
        raise ConfigError(f"top_k={policy.top_k} must be >= 0 (0 switches it off)")
    if not 0 < policy.top_p <= 1:
        raise ConfigError(f"top_p={policy.top_p} must be in (0, 1] (1 switches it off)")
    if not 0 <= policy.min_p <= 1:
        raise ConfigError(f"min_p={policy.min_p} must be in [0, 1] (0 switches it off)")
