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
    """The newest items that fit, in order. They are dealt round-robin among tenants until the room is used.

    Each tenant's newest come first, and the next item goes where the sum stays smallest with it (max-min fairness): a
    tenant with little keeps all of it. If no item fits, the newest is kept.
    """
    newest_first = items[::-1]
    sums: dict[str, float] = {}
    deal: list[tuple[float, int]] = []  # the sum of a tenant's items up to this one, and its place
    for place, item in enumerate(newest_first):
        sums[tenant(item)] = sums.get(tenant(item), 0.0) + size(item)
        deal.append((sums[tenant(item)], place))
    kept: list[int] = []
    full: set[str] = set()
    for _, place in sorted(deal):
        item = newest_first[place]
        if size(item) > room + 1e-9:
            full.add(tenant(item))
        if tenant(item) not in full:
            room -= size(item)
            kept.append(place)
    return [newest_first[place] for place in sorted(kept, reverse=True)] or list(items[-1:])


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
