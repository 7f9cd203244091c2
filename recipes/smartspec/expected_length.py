"""Expected tokens of a step, the target's included."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from operator import mul

from distillspec.errors import ConfigError


def full_tree(acceptances: Sequence[Sequence[float]], widths: Sequence[int] | None = None) -> float:
    """Return the tokens of a full tree, as Medusa's, and the target's token: 1 + Σ_i Π_{j ≤ i} Σ_{r < k_j} a_{j,r}.

    Head i's candidate r is accepted with probability `acceptances[i][r]` if all heads before it succeeded. Candidates
    of one head exclude each other, so it succeeds with their sum.

    Args:
        widths: candidates taken of each head, for as many heads as it has entries. None: all.

    Raises:
        ConfigError: a head's candidates sum to more than 1.
    """
    heads = [sum(head) for head in acceptances]
    _check([min(1.0, head) if head < 1 + 1e-9 else head for head in heads])
    if widths is not None:
        heads = [sum(head[:width]) for head, width in zip(acceptances, widths, strict=False)]
    return 1.0 + sum(accumulate((min(1.0, head) for head in heads), mul))


def paper_eq10(alphas: Sequence[float], widths: Sequence[int]) -> float:
    """SmartSpec's Eq. 10 as printed, for its figures only.

    Σ_{i ≥ 1} (i + 1) (1 − α_{i+1}) Π_{j ≤ i} (1 − (1 − α_j)^{k_j}), with α_{h+1} = 0. Candidates are independent there.
    "None accepted at i + 1" ignores their number. The case that nothing is accepted (the root's token alone) is
    missing. So wide trees get more tokens than they have levels.

    Raises:
        ConfigError: the widths are more or fewer than the rates.
    """
    if len(alphas) != len(widths):
        raise ConfigError(f"{len(alphas)} acceptance rates but {len(widths)} widths; give one each")
    _check(alphas)
    succeeds = [1 - (1 - alpha) ** width for alpha, width in zip(alphas, widths, strict=True)]
    fails_next = [1 - alpha for alpha in [*alphas[1:], 0.0]]
    return sum((i + 2) * fails_next[i] * prod(succeeds[: i + 1]) for i in range(len(alphas)))


def _check(alphas: Sequence[float]) -> None:
    for alpha in alphas:
        if not 0 <= alpha <= 1:
            raise ConfigError(f"acceptance rate {alpha} must be in [0, 1]")
