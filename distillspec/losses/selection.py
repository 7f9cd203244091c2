"""Token selection (AdaSPEC)."""

from __future__ import annotations

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
