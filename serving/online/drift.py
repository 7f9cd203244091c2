"""Whether acceptance falls somewhere: a short average against a long one, by domain or tenant."""

from __future__ import annotations

from dataclasses import dataclass

SHORT, LONG = 24.0, 240.0  # requests over which the averages forget (a factor e)
SETTLED = 48  # requests of a cluster before its averages mean anything


@dataclass
class _Averages:
    """Exponential sums, so that requests weigh as their judged tokens do and the beginning is not biased."""

    short: tuple[float, float] = (0.0, 0.0)  # accepted, tried
    long: tuple[float, float] = (0.0, 0.0)
    seen: int = 0

    def add(self, tried: int, accepted: int) -> None:
        self.short = _decayed(self.short, SHORT, accepted, tried)
        self.long = _decayed(self.long, LONG, accepted, tried)
        self.seen += 1


class DriftDetector:
    """Fed with finished requests in order; remembers when it last told of a cluster."""

    def __init__(self, drop: float) -> None:
        self.drop = drop
        self._clusters: dict[str, _Averages] = {}

    def add(self, cluster: str, tried: int, accepted: int) -> bool:
        """Count a request; True where its cluster, or the traffic as a whole, has just fallen by `drop`.

        A new domain shows in the whole first: it has no long average of its own.
        """
        if tried == 0:
            return False
        fallen = False
        for name in {cluster, ""}:
            averages = self._clusters.setdefault(name, _Averages())
            averages.add(tried, accepted)
            if averages.seen >= SETTLED and _ratio(averages.long) - _ratio(averages.short) > self.drop:
                fallen = True
        return fallen

    def averages(self) -> dict[str, tuple[float, float]]:
        """Cluster → short and long α; "" is the whole traffic."""
        return {name: (_ratio(a.short), _ratio(a.long)) for name, a in self._clusters.items()}

    def restart(self) -> None:
        """What is now is the new normal: an update answers a fall once."""
        for averages in self._clusters.values():
            averages.long, averages.seen = averages.short, 0


def _decayed(sums: tuple[float, float], span: float, accepted: int, tried: int) -> tuple[float, float]:
    keep = 1 - 1 / span
    return keep * sums[0] + accepted, keep * sums[1] + tried


def _ratio(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1] if sums[1] > 0 else 0.0
