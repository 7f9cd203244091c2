"""Tables by tenant and cache salt: apart, in bounded number, deleted by tenant."""

from __future__ import annotations

from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.proposers.tenant_tables import OWNERS, TenantTables


def sequence(tenant: str, salt: str = "") -> SequenceState:
    request = Request(f"{tenant}/{salt}", (1,), tenant=tenant, cache_salt=salt)
    return SequenceState(request.id, request, 0, 0, [1], frozenset(), 20)


def test_owners_have_tables_of_their_own() -> None:
    tables = TenantTables[list[int]](list)
    tables.of(sequence("a")).append(1)
    assert tables.of(sequence("a")) == [1]
    assert tables.of(sequence("a", "salt")) == tables.of(sequence("b")) == []


def test_a_tenant_is_forgotten_with_all_its_salts() -> None:
    tables = TenantTables[list[int]](list)
    for owner in (("a", ""), ("a", "salt"), ("b", "")):
        tables.of(sequence(*owner)).append(1)
    tables.forget("a")
    assert [tables.of(sequence(*owner)) for owner in (("a", ""), ("a", "salt"), ("b", ""))] == [[], [], [1]]


def test_the_owners_served_longest_ago_lose_their_tables() -> None:
    tables = TenantTables[list[int]](list)
    for number in range(OWNERS + 1):
        tables.of(sequence(str(number))).append(number)
        tables.of(sequence("0"))
    assert [bool(tables.of(sequence(str(number)))) for number in (0, OWNERS, 1)] == [True, True, False]
