"""A fair part for every tenant where one asks for too much, and never so little that nothing is learnt from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

LEAST = 1 / 16  # of a token's full weight: another tenant's single request must not silence a large one


def fair_weights(amounts: Mapping[str, float], share: float) -> dict[str, float]:
    """Tenant → weight of its tokens, at most 1: nobody among several counts for more than `share` of the whole.

    A weight below `LEAST` is raised to it. So a tenant with more than some 16 times the text of all others together
    counts for more than its share.
    """
    if len(amounts) < 2:
        return dict.fromkeys(amounts, 1.0)
    level = fair_level(list(amounts.values()), share)
    return {tenant: max(LEAST, min(1.0, level / amount)) for tenant, amount in amounts.items()}


def newest_within(
    items: Sequence[T], room: float, tenant: Callable[[T], str], size: Callable[[T], float] = lambda item: 1
) -> list[T]:
    """The newest (last) items that fit, in order. Where room is short, those with little keep all of it.

    The room is shared by max-min fairness: every tenant gets the same, and what one does not need goes to the others.
    The newest item is kept in any case.
    """
    amounts: dict[str, float] = {}
    for item in items:
        amounts[tenant(item)] = amounts.get(tenant(item), 0.0) + size(item)
    left = dict.fromkeys(amounts, _max_min_level(list(amounts.values()), room))
    full: set[str] = set()
    kept: list[T] = []
    for item in reversed(items):
        name = tenant(item)
        left[name] -= size(item)
        if kept and left[name] < -1e-9:
            full.add(name)
        if name not in full:
            kept.append(item)
    return kept[::-1]


def _max_min_level(amounts: Sequence[float], room: float) -> float:
    """The largest L ≤ max(amounts) with Σ min(amount, L) ≤ room."""
    for place, amount in enumerate(sorted(amounts)):
        equal = room / (len(amounts) - place)
        if amount >= equal:
            return equal
        room -= amount
    return max(amounts, default=0.0)


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
