"""A fair part for every tenant where one asks for too much."""

from __future__ import annotations

from collections.abc import Sequence


def fair_level(amounts: Sequence[float], share: float) -> float:
    """The most that each may have so that nobody has more than `share` of what all have together.

    The largest L ≤ share · Σ min(amount, L). With so few that their shares could not make a whole, everyone's share is
    an equal part.
    """
    share = max(share, 1 / len(amounts))
    below, above = 0.0, float(max(amounts))
    if above <= share * sum(amounts):
        return above
    for _ in range(60):
        middle = (below + above) / 2
        fits = middle <= share * sum(min(amount, middle) for amount in amounts) * (1 + 1e-9)
        below, above = (middle, above) if fits else (below, middle)
    return above
