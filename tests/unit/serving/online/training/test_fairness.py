"""Room that is too short for all is shared by tenants, and used."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from distillspec.serving.online.training.fairness import LEAST, fair_weights, newest_within


def items(tenants: int, each: int) -> list[tuple[str, int]]:
    """(Tenant, place), the tenants in turn."""
    return [(f"t{tenant}", place) for place in range(each) for tenant in range(tenants)]


@pytest.mark.parametrize(("room", "tenants"), [(24, 5), (64, 64), (64, 65), (24, 100)])
def test_the_room_is_used_however_many_tenants_share_it(room: int, tenants: int) -> None:
    kept = newest_within(items(tenants, 30), room, lambda item: item[0])
    assert len(kept) == room
    counts = Counter(tenant for tenant, _ in kept)
    assert max(counts.values()) - min(counts.values()) <= 1
    assert len(counts) == min(room, tenants)
    assert kept == sorted(kept, key=items(tenants, 30).index)
    assert all(place >= 30 - counts[tenant] for tenant, place in kept)  # each tenant's newest


def test_room_in_tokens_is_used_too() -> None:
    kept = newest_within(items(20, 3), 1500, lambda item: item[0], lambda item: 200)
    assert len(kept) == 7
    assert len({tenant for tenant, _ in kept}) == 7


def test_a_tenant_with_little_keeps_all_of_it_and_one_item_stays_where_none_fits() -> None:
    sizes = [("small", 30)] * 3 + [("large", 200)] * 20
    kept = newest_within(sizes, 1000, lambda item: item[0], lambda item: item[1])
    assert Counter(tenant for tenant, _ in kept) == {"small": 3, "large": 4}
    assert newest_within(sizes, 10, lambda item: item[0], lambda item: item[1]) == sizes[-1:]
    assert newest_within([], 10, str) == []


def test_no_tenant_starves_over_many_updates() -> None:
    """Sixty tenants with short answers fill the room of every update, and one has long answers."""
    chance, learnt = Random(0), Counter[str]()
    updates, room, most = 60, 600, 20
    sizes = {f"t{number}": most for number in range(60)} | {"long": 10 * most}
    for _ in range(updates):
        new = [tenant for tenant in sizes for _ in range(2)]
        chance.shuffle(new)
        kept = newest_within(new, room, str, lambda tenant: sizes[tenant])
        assert sum(sizes[tenant] for tenant in kept) <= room
        learnt.update(set(kept))
    assert set(learnt) == set(sizes)
    assert min(learnt.values()) >= updates / 10


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
def test_every_tenant_keeps_a_weight_and_none_loses_to_a_larger_one(share: float) -> None:
    """A large tenant may count for less than its text, never a small one for less than a large one of equal text."""
    chance = Random(1)
    for _ in range(50):
        amounts = {f"t{number}": 10 ** chance.uniform(1, 5) for number in range(chance.randrange(2, 12))}
        weights = fair_weights(amounts, share)
        assert set(weights) == set(amounts)
        assert all(LEAST <= weight <= 1 for weight in weights.values())
        by_size = sorted(amounts, key=lambda tenant: amounts[tenant])
        assert [weights[tenant] for tenant in by_size] == sorted(weights.values(), reverse=True)
        counted, whole = {t: amounts[t] * weights[t] for t in amounts}, sum(amounts.values())
        smallest = by_size[0]
        assert counted[smallest] / sum(counted.values()) >= amounts[smallest] / whole * (1 - 1e-9)
        for less, more in pairwise(by_size):
            assert counted[less] <= counted[more] * (1 + 1e-9), "more text never counts for less"
