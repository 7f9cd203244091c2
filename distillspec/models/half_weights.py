"""Float16 for weights of models in float32. Checkpoints are published in 16 bits, so it seldom costs precision.

A bfloat16 number is a float16 number unless it is very small. Then the whole weight is scaled by a power of two, which
loses nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def half_scale(weight: Tensor) -> float:
    """Return the power of two that brings a weight close to float16's largest number, 1 where it fits as it is."""
    largest = float(weight.abs().max())
    if largest == 0 or not math.isfinite(largest) or _rounds_alike(weight, 1.0, torch.finfo(torch.float32).eps):
        return 1.0
    return 2.0 ** (15 - math.frexp(largest)[1])


def fits_half(weight: Tensor, *, exact: bool) -> bool:
    """Return True if a weight `[out, in]` can be held in float16, scaled.

    Args:
        exact: only if no element changes by more than its dtype's rounding of its row's largest.
    """
    low, high = weight.aminmax()  # not finite if one element is not: isfinite() takes twenty times as long
    if not (low.isfinite() and high.isfinite()):
        return False
    return not exact or _rounds_alike(weight.float(), half_scale(weight.float()), torch.finfo(weight.dtype).eps)


def rounded_to_half(weight: Tensor) -> Tensor:
    """Return a weight in float32 that float16 holds, scaled: the nearest one."""
    scale = half_scale(weight)
    return (weight * scale).to(torch.float16).float() / scale


def _rounds_alike(weight: Tensor, scale: float, eps: float) -> bool:
    """Return True if float16 changes no element by more than the rounding `eps` of its row's largest."""
    if scale == 1.0 and torch.equal(weight.to(torch.float16).float(), weight):
        return True  # the usual case, in a fifth of the time
    error = ((weight * scale).to(torch.float16).float() / scale - weight).abs().amax(1)
    return bool((error <= eps * weight.abs().amax(1)).all())
