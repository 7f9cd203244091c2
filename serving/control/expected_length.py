"""How many tokens a step is expected to emit, the target's own included."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import accumulate
from math import prod
from operator import mul

from distillspec.errors import ConfigError


def chain(alpha: float, length: int) -> float:
    """A chain of `length` drafted tokens that each stand with probability `alpha`: (1 − α^(k+1)) / (1 − α).

    SmartSpec (Liu et al. 2024), Eq. 4; k + 1 at α = 1. Raises ConfigError for an α outside [0, 1].
    """
    _check([alpha])
    return float(length + 1) if alpha == 1 else (1 - alpha ** (length + 1)) / (1 - alpha)


def full_tree(acceptances: Seq[Seq[float]]) -> float:
    """A full tree, as Medusa's: head i offers candidates that stand with probabilities `acceptances[i]`.

    Candidates of one head exclude each other, so it succeeds with their sum: 1 + Σ_i Π_{j≤i} Σ_r a_{j,r}. Raises
    ConfigError where they sum to more than 1.
    """
    heads = [sum(head) for head in acceptances]
    _check([min(1.0, head) if head < 1 + 1e-9 else head for head in heads])
    return 1.0 + sum(accumulate((min(1.0, head) for head in heads), mul))


def paper_eq10(alphas: Seq[float], widths: Seq[int]) -> float:
    """SmartSpec's Eq. 10 as printed, for its figures only.

    Σ_i (1 − α_{i+1}) · i · Π_{j≤i} (1 − (1 − α_j)^{k_j}), with α_{h+1} = 0: it takes the candidates of a head for
    independent, a head's failure for 1 − α_{i+1} whatever its width, and leaves the target's own token out.
    """
    if len(alphas) != len(widths):
        raise ConfigError(f"{len(alphas)} acceptance rates but {len(widths)} widths; give one each")
    _check(alphas)
    succeeds = [1 - (1 - alpha) ** width for alpha, width in zip(alphas, widths, strict=True)]
    fails_next = [1 - alpha for alpha in [*alphas[1:], 0.0]]
    return sum(fails_next[i] * (i + 1) * prod(succeeds[: i + 1]) for i in range(len(alphas)))


def _check(alphas: Seq[float]) -> None:
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise ConfigError(f"acceptance rate {alpha} must be in [0, 1]")
