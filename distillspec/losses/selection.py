"""Token selection (AdaSPEC) and advantages (TVD++)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillspec.errors import ConfigError


def select_tokens(
    draft_losses: Tensor, reference_losses: Tensor, fraction: float, valid: Tensor | None = None
) -> Tensor:
    """Return bool `[N]`: the `fraction` of tokens where the draft is furthest behind the reference draft.

    The gap is draft loss minus reference loss, per token in nats (AdaSPEC, Hu et al. 2025, arXiv 2510.19779): tokens
    that a draft of this size *can* learn and has not. Rounds to the nearest count, at least one. Earlier tokens win
    ties. Positions where `valid` is False are neither chosen nor counted.
    """
    if not 0 < fraction <= 1:
        raise ConfigError(f"token selection fraction={fraction} must be in (0, 1]")
    if draft_losses.shape != reference_losses.shape:
        raise ValueError(
            f"draft losses {tuple(draft_losses.shape)} and reference losses "
            f"{tuple(reference_losses.shape)} must have one shape"
        )
    gap = (draft_losses - reference_losses).detach().float()
    if not bool(torch.isfinite(gap).all()):
        raise ValueError("token selection: a per-token loss is not finite")
    eligible = gap.numel() if valid is None else int(valid.sum())
    if valid is not None:
        gap = gap.masked_fill(~valid, -torch.inf)
    chosen = gap.argsort(descending=True, stable=True)[: max(round(fraction * eligible), min(eligible, 1))]
    return torch.zeros_like(gap, dtype=torch.bool).index_fill_(0, chosen, True)


def advantages(reward: Tensor, mask: Tensor, mean: float | None = None) -> Tensor:
    """Return (reward − mean) / standard deviation for rewards of 0 and 1, `[N]` float32, 0 outside `mask` (TVD++).

    Rewards that are all equal give advantages of 0: they rank no token above another.

    Args:
        mean: that of the whole batch, of which these N may be a part. None takes it over `mask`.
    """
    if mean is None:
        mean = float(reward[mask].float().mean()) if bool(mask.any()) else 0.0
    centred = torch.where(mask, reward.float() - mean, 0)
    return centred / max(math.sqrt(mean * (1 - mean)), 1e-6)
