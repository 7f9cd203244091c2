"""Acceptance and residual of exact verification (Leviathan et al. 2023, Chen et al. 2023).

Evaluation and serving share them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def accepts(target_at: Tensor, draft_at: Tensor, uniforms: Tensor) -> Tensor:
    """Return True where drafted tokens x are accepted, with probability min(1, p(x) / q(x)): u · q(x) < p(x).

    Args:
        target_at: `[...]` p(x).
        draft_at: `[...]` q(x), 1 for deterministic proposers.
        uniforms: `[...]` u in [0, 1).
    """
    return uniforms * draft_at < target_at


def residual_probs(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """Return the unnormalised residual max(0, p − q) `[..., V]` that follows a rejected token.

    Where rounding leaves no mass, p = q up to rounding, and p itself is returned.
    """
    residual = (target_probs - draft_probs).clamp(min=0)
    return torch.where(residual.sum(-1, keepdim=True) > 0, residual, target_probs)
