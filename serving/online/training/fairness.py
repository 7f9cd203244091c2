"""Fair shares among tenants: no tenant dominates an update, and none is left out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

T = TypeVar("T")

LEAST = 1 / 16  # of full weight. One request of another tenant must not reduce a large tenant to nothing.


def fair_weights(amounts: Mapping[str, float], share: float) -> dict[str, float]:
    """Return tenant → weight of its tokens, at most 1, so that none of several counts for more than `share`.

    Weights below `LEAST` are raised to it. So a tenant with more than about 16 times the text of all others together
    counts for more than its share.
    """
    if len(amounts) < 2:
        return dict.fromkeys(amounts, 1.0)
    level = fair_level(list(amounts.values()), share)
    return {tenant: max(LEAST, min(1.0, level / amount)) for tenant, amount in amounts.items()}


def newest_within(
    items: Sequence[T], room: float, tenant: Callable[[T], str], size: Callable[[T], float] = lambda item: 1
) -> list[T]:
    """Return the newest items that fit into `room`, in order, shared out among tenants.

    First comes the newest item of each tenant, the newest tenant first: one whose items are long gets its turn too,
    however many others there are. Then max-min fairness: the next item comes from the tenant whose sum stays smallest
    with it, its newest first. A tenant with little keeps all of it. If no item fits, the newest is returned.
    """
    newest_first = items[::-1]
    sums: dict[str, float] = {}
    order: list[tuple[float, int]] = []  # the sum of a tenant's items up to this one, 0 for its first, and its index
    for index, item in enumerate(newest_first):
        before = sums.get(tenant(item), 0.0)
        sums[tenant(item)] = before + size(item)
        order.append((sums[tenant(item)] if before else 0.0, index))
    kept: list[int] = []
    full: set[str] = set()
    for _, index in sorted(order):
        item = newest_first[index]
        if size(item) > room + 1e-9:
            full.add(tenant(item))
        if tenant(item) not in full:
            room -= size(item)
            kept.append(index)
    return [newest_first[index] for index in sorted(kept, reverse=True)] or list(items[-1:])


def fair_level(amounts: Sequence[float], share: float) -> float:
    """Return the cap on each amount at which no tenant has more than `share` of the capped total.

    It is the largest L ≤ share · Σ min(amount, L). With fewer than 1 / share tenants, shares are equal.
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
