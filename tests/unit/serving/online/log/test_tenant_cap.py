"""Cap on a tenant's share of the logged requests."""

from __future__ import annotations

from distillspec.serving.online.log.tenant_cap import TenantCap


def test_one_tenant_among_several_gets_its_share_of_the_newest_requests() -> None:
    cap = TenantCap(0.5)
    logged = [tenant for i in range(2000) if cap.admits(tenant := "good" if i % 20 == 0 else "flood")]
    assert logged.count("good") == 100  # all of it
    assert 0.95 <= logged.count("flood") / 1000 <= 1.05
    for _ in range(1000):
        cap.admits("flood")  # the other one stopped, and is forgotten
    assert all(cap.admits("flood") for _ in range(100))
    alone = TenantCap(0.5)
    assert all(alone.admits("only") for _ in range(100))
    # 5 requests of one tenant among 507 of another, then a single one.
    for few in (5, 1):
        cap = TenantCap(0.5)
        got_in = [cap.admits("small" if i < few else "large") for i in range(512)]
        assert all(got_in[:few])
        assert sum(got_in[few:]) >= 0.49 * 507
