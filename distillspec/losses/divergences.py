"""Readable divergences between target p and draft q, in nats, one value a position, no reduction.

Each comes twice: the formula on a `BucketedPair`, and the dense reference on logits. Dense references take
`draft_logits [N, V]` (differentiable) and `target_logits [N, V]` (no gradient) and return `[N]` float32. For NaN and
+inf they raise ValueError naming the loss and the first bad row. −inf logits are zero probabilities. log 0 counts as
−87.3 (the smallest normal float32), so a draft that rules out a target token gets a large but finite loss.
`temperature` divides both logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses.pairs import BucketedPair, dense_pair


def forward_kl(pair: BucketedPair) -> Tensor:
    """Return KL(p ‖ q) = Σ p (log p − log q) `[N]`, p renormalised to the draft's vocabulary."""
    target_logp = pair.renormalised_target_logp()
    return (target_logp.exp() * (target_logp - pair.draft_logp)).sum(-1)


def reverse_kl(pair: BucketedPair) -> Tensor:
    """Return KL(q ‖ p) = Σ q (log q − log p) `[N]`. Tokens outside the draft's vocabulary add nothing, as q = 0 there.

    Draft mass on tail tokens that were not drawn is charged log q − log p of the whole tail. The expected correction
    is 0. Without it the draft could hide mass there.
    """
    values = (pair.draft_probs * (pair.draft_logp - pair.target_logp)).sum(-1)
    return values if pair.tail_rate is None else values + (1 - pair.draft_probs.sum(-1)) * pair.tail_rate


def jensen_shannon(pair: BucketedPair, beta: float = 0.5) -> Tensor:
    """Return β KL(p ‖ m) + (1 − β) KL(q ‖ m) `[N]` with m = β p + (1 − β) q (Agarwal et al. 2024, GKD, Eq. 1).

    We use q log((1 − β) q / m) and add the constant −log(1 − β), valid because Σ q = 1. A bucket with p = 0 then
    contributes exactly 0, so a few tail draws are enough.
    """
    check_beta(beta)
    own_logp = pair.draft_logp + math.log(1 - beta)
    mixture_logp = torch.logaddexp(pair.target_logp + math.log(beta), own_logp)
    from_target = (pair.target_probs * (pair.target_logp - mixture_logp)).sum(-1)
    from_draft = (pair.draft_probs * (own_logp - mixture_logp)).sum(-1) - math.log(1 - beta)
    # Outside the draft's vocabulary q = 0, m = β p, and p log(p / m) = −p log β.
    return beta * (from_target - math.log(beta) * pair.outside) + (1 - beta) * from_draft


def jensen_shannon_and_kl(pair: BucketedPair, beta: float = 0.5, kl: float = 0.1) -> Tensor:
    """Return JSD(p, q) + kl · KL(p ‖ q) `[N]`: a share of forward KL lets JSD learn from any start.

    JSD's gradient is proportional to q and vanishes where the draft gives the target's tokens next to nothing. Forward
    KL's does not. Where the two overlap it is a small part of the sum.
    """
    check_kl(kl)
    return jensen_shannon(pair, beta) + kl * forward_kl(pair)


def check_kl(kl: Any, owner: str = "jsd_kl") -> None:
    """Raise ConfigError for a weight that is negative, NaN or infinite."""
    if not (isinstance(kl, (int, float)) and kl >= 0 and math.isfinite(kl)):
        raise ConfigError(f"{owner} kl={kl} must be finite and >= 0")


def check_beta(beta: Any, owner: str = "jsd") -> None:
    """Raise ConfigError for a weight of the target outside (0, 1)."""
    if not (isinstance(beta, (int, float)) and 0 < beta < 1):
        raise ConfigError(f"{owner} beta={beta} must lie strictly between 0 and 1; use fkl or rkl at the ends")


def total_variation(pair: BucketedPair) -> Tensor:
    """Return ½ Σ |p − q| = 1 − Σ min(p, q) `[N]` (Leviathan et al. 2023, Corollary 3.6, and DistillSpec's TVD)."""
    return 1 - torch.minimum(pair.target_probs, pair.draft_probs).sum(-1)


def fkl(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return forward KL, KL(target ‖ draft) `[N]` (Hinton et al. 2015, and DistillSpec, Zhou et al. 2024, Table 1)."""
    return forward_kl(dense_pair(draft_logits, target_logits, temperature, "fkl"))


def rkl(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return reverse KL, KL(draft ‖ target) `[N]` (Gu et al. 2024, MiniLLM, and DistillSpec, Table 1)."""
    return reverse_kl(dense_pair(draft_logits, target_logits, temperature, "rkl"))


def jsd(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0, beta: float = 0.5) -> Tensor:
    """Return the generalised Jensen–Shannon divergence `[N]`, mixture β·target + (1 − β)·draft (GKD, Eq. 1)."""
    return jensen_shannon(dense_pair(draft_logits, target_logits, temperature, "jsd"), beta)


def jsd_kl(
    draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0, beta: float = 0.5, kl: float = 0.1
) -> Tensor:
    """Return JSD plus a share of forward KL `[N]`: `distill train`'s default."""
    return jensen_shannon_and_kl(dense_pair(draft_logits, target_logits, temperature, "jsd_kl"), beta, kl)


def tvd(draft_logits: Tensor, target_logits: Tensor, *, temperature: float = 1.0) -> Tensor:
    """Return total variation distance `[N]` in [0, 1]: one minus the acceptance rate (DistillSpec, Eq. 1)."""
    return total_variation(dense_pair(draft_logits, target_logits, temperature, "tvd"))
