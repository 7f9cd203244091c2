"""Acceptance rate α = Σ min(p, q), and the losses that raise it directly.

Same conventions as `divergences`: a formula on a `BucketedPair` and a dense reference on logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses.divergences import forward_kl, total_variation
from distillspec.losses.pairs import BucketedPair, check_temperature, dense_pair
from distillspec.sampling import policy_probs
from distillspec.types import SamplingPolicy


def acceptance(pair: BucketedPair) -> Tensor:
    """Return α `[N]`.

    With a tail bucket it is an upper bound: inside the tail, p and q may overlap less. With tokens drawn from the tail
    it is an unbiased estimate.
    """
    return torch.minimum(pair.target_probs, pair.draft_probs).sum(-1)


def negative_log_acceptance(pair: BucketedPair) -> Tensor:
    """Return −log α `[N]`, summed in log space so that a tiny overlap neither underflows nor loses its gradient."""
    return -torch.logsumexp(torch.minimum(pair.target_logp, pair.draft_logp), -1)


def adaptive_hybrid(pair: BucketedPair, eta: float = 3.0) -> Tensor:
    """Return λ KL(p ‖ q) + (1 − λ) TVD(p, q) `[N]`, with λ = exp(−η α) per position and without gradient."""
    check_eta(eta)
    kl_share = torch.exp(-eta * acceptance(pair).detach())
    return kl_share * forward_kl(pair) + (1 - kl_share) * total_variation(pair)


def check_eta(eta: Any, owner: str = "lk_hybrid") -> None:
    """Raise ConfigError for a rate that is negative, NaN or infinite."""
    if not (isinstance(eta, (int, float)) and eta >= 0 and math.isfinite(eta)):
        raise ConfigError(f"{owner} eta={eta} must be finite and >= 0")


def lk(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return −log α `[N]`, the likelihood-of-acceptance loss (LK losses, arXiv 2602.23881)."""
    return negative_log_acceptance(dense_pair(draft_logits, target_logits, temperature, "lk"))


def lk_hybrid(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0, eta: float = 3.0) -> Tensor:
    """Return a loss `[N]` that is KL for a poor draft and TVD for a good one (LK losses, arXiv 2602.23881, η = 3)."""
    return adaptive_hybrid(dense_pair(draft_logits, target_logits, temperature, "lk_hybrid"), eta)


def acceptance_rate(
    draft_logits: Tensor,
    target_logits: Tensor,
    *,
    temperature: float = 1.0,
    policy: SamplingPolicy | None = None,
    kept_ids: Tensor | None = None,
) -> Tensor:
    """Return α = Σ min(target_probs, draft_probs) `[N]` float32 in [0, 1] (Leviathan et al. 2023, Theorem 3.5).

    Args:
        policy: its transforms apply to both models, as in the serving engine. None compares plain softmaxes at
            `temperature`.
        kept_ids: `[Vd]` absolute ids of the draft's columns. The draft has probability 0 elsewhere.

    Raises:
        NonFiniteLogits: logits hold NaN or +inf (a ValueError).
        ConfigError: both `temperature` and `policy` are given.
    """
    if policy is None:
        check_temperature(temperature)
        policy = SamplingPolicy(temperature=temperature)
    elif temperature != 1.0:
        raise ConfigError(f"acceptance_rate: temperature={temperature} and a policy are given; put it in the policy")
    target_probs = policy_probs(target_logits, policy)
    if kept_ids is not None:
        target_probs = target_probs.index_select(-1, kept_ids)
    if target_probs.shape != draft_logits.shape:
        raise ValueError(
            f"acceptance_rate: draft logits {tuple(draft_logits.shape)} do not fit target columns "
            f"{tuple(target_probs.shape)}; pass kept_ids for a truncated draft vocabulary"
        )
    return torch.minimum(target_probs, policy_probs(draft_logits, policy)).sum(-1).clamp(max=1)
