"""Drift detector: compares short and long averages of acceptance, by domain or tenant."""

from __future__ import annotations

from dataclasses import dataclass

SHORT, LONG = 24.0, 240.0  # requests over which the weights decay by a factor e
SETTLED = 48  # requests of a cluster before its averages are compared


@dataclass
class _Averages:
    """Exponentially decayed sums: requests count by their drafted tokens, without bias at the start."""

    short: tuple[float, float] = (0.0, 0.0)  # accepted, tried
    long: tuple[float, float] = (0.0, 0.0)
    count: int = 0  # requests since the start or the last restart

    def add(self, tried: int, accepted: int) -> None:
        self.short = _decayed(self.short, SHORT, accepted, tried)
        self.long = _decayed(self.long, LONG, accepted, tried)
        self.count += 1


class DriftDetector:
    """Detects drops of acceptance in finished requests, which `add` takes in order.

    Args:
        drop: of α, short against long average, that counts as drift.
    """

    def __init__(self, drop: float) -> None:
        self.drop = drop
        self._clusters: dict[str, _Averages] = {}

    def add(self, cluster: str, tried: int, accepted: int) -> bool:
        """Count a request. Return True if α of its cluster or of all traffic has dropped by more than `drop`.

        A new domain shows in all traffic first: it has no long average of its own.
        """
        if tried == 0:
            return False
        dropped = False
        for name in {cluster, ""}:
            averages = self._clusters.setdefault(name, _Averages())
            averages.add(tried, accepted)
            if averages.count >= SETTLED and _ratio(averages.long) - _ratio(averages.short) > self.drop:
                dropped = True
        return dropped

    def averages(self) -> dict[str, tuple[float, float]]:
        """Return cluster → short and long α. The cluster "" is all traffic."""
        return {name: (_ratio(a.short), _ratio(a.long)) for name, a in self._clusters.items()}

    def restart(self) -> None:
        """Take the present α as the new long average. An update answers a drop only once."""
        for averages in self._clusters.values():
            averages.long, averages.count = averages.short, 0


def _decayed(sums: tuple[float, float], span: float, accepted: int, tried: int) -> tuple[float, float]:
    keep = 1 - 1 / span
    return keep * sums[0] + accepted, keep * sums[1] + tried


def _ratio(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1] if sums[1] > 0 else 0.0
