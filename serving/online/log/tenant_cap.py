"""Cap on a tenant's share of the logged requests."""

from __future__ import annotations

from collections import Counter, deque

RECENT = 512  # requests over which a tenant's share of the log is counted


class TenantCap:
    """Cap that keeps one of several tenants from filling the log: it gets `share` of the newest requests.

    The cap is a share of all recent requests, not a multiple of what others sent: one request of another tenant must
    not silence a large one. What others do not use stays free for what is in the log already.
    """

    def __init__(self, share: float, recent: int = RECENT) -> None:
        self.share = share
        self._recent: deque[str] = deque(maxlen=recent)
        self._counts: Counter[str] = Counter()
        self._credit: dict[str, float] = {}  # of tenants over their share

    def admits(self, tenant: str) -> bool:
        """Return True if another request of this tenant may be logged. A single tenant may fill the log."""
        self._count(tenant)
        share = max(self.share, 1 / len(self._counts))
        part = share * len(self._recent) / self._counts[tenant]
        if part >= 1:
            self._credit.pop(tenant, None)
            return True
        credit = self._credit.get(tenant, 0.0) + part
        self._credit[tenant] = credit - (credit >= 1)
        return credit >= 1

    def _count(self, tenant: str) -> None:
        if len(self._recent) == self._recent.maxlen:
            oldest = self._recent.popleft()
            self._counts[oldest] -= 1
            if not self._counts[oldest]:
                del self._counts[oldest]
                self._credit.pop(oldest, None)
        self._recent.append(tenant)
        self._counts[tenant] += 1
