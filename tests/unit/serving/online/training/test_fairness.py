"""Room that is too short for all is shared by tenants, and used."""

from __future__ import annotations

from collections import Counter

import pytest

from distillspec.serving.online.training.fairness import newest_within


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
