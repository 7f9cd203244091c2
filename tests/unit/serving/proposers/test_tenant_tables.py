"""Tables by tenant and cache salt: apart, in bounded number, deleted by tenant."""

from __future__ import annotations

from distillspec.serving.proposers.tenant_tables import OWNERS, TenantTables


def test_owners_have_tables_of_their_own() -> None:
    tables = TenantTables[list[int]](lambda _: [])
    tables.of(("a", "")).append(1)
    assert tables.of(("a", "")) == [1]
    assert tables.of(("a", "salt")) == tables.of(("b", "")) == []


def test_a_tenant_is_forgotten_with_all_its_salts() -> None:
    tables = TenantTables[list[int]](lambda _: [])
    for owner in (("a", ""), ("a", "salt"), ("b", "")):
        tables.of(owner).append(1)
    tables.forget("a")
    assert [tables.of(owner) for owner in (("a", ""), ("a", "salt"), ("b", ""))] == [[], [], [1]]


def test_the_owners_served_longest_ago_lose_their_tables() -> None:
    tables = TenantTables[list[int]](lambda _: [])
    for number in range(OWNERS + 1):
        tables.of((str(number), "")).append(number)
        tables.of(("0", ""))
    assert [bool(tables.of((str(number), ""))) for number in (0, OWNERS, 1)] == [True, True, False]


def test_a_tenant_with_many_salts_displaces_its_own_tables() -> None:
    tables = TenantTables[list[int]](lambda _: [])
    tables.of(("quiet", "")).append(1)
    for number in range(2 * OWNERS):
        tables.of(("flood", str(number))).append(number)
    assert tables.of(("quiet", "")) == [1]
    assert tables.of(("flood", str(2 * OWNERS - 1))), "the newest are kept"


def test_as_many_owners_as_are_served_keep_their_tables() -> None:
    tables = TenantTables[list[int]](lambda _: [])
    tables.serve(2 * OWNERS)
    for _ in range(2):
        for number in range(2 * OWNERS):
            tables.of((str(number), "")).append(number)
    assert all(len(tables.of((str(number), ""))) == 2 for number in range(2 * OWNERS))
    tables.serve(1)
    tables.of(("new", ""))
    assert sum(bool(tables.of((str(number), ""))) for number in range(2 * OWNERS)) < OWNERS
