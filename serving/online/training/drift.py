"""Drift of the traffic: short and long averages of acceptance by domain or tenant, over every logged answer once."""

from __future__ import annotations

from dataclasses import dataclass

from distillspec.config import AdaptConfig
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog

SHORT, LONG = 24.0, 240.0  # requests over which the weights decay by a factor e
SETTLED = 48  # requests of a cluster before its averages are compared
LOOK_BACK = 1024  # answers. Earlier ones no longer weigh in the long average.


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


class DriftWatch:
    """The detector's way through the log. Nothing is learnt here.

    Args:
        cursor: number of the last answer that an update has learnt from. It answered any drop until then.

    Attributes:
        drifted: True if acceptance has dropped since the last update.
    """

    def __init__(self, config: AdaptConfig, replay: ReplayLog, cursor: int) -> None:
        self.config, self.replay, self.drifted = config, replay, False
        self.detector = DriftDetector(config.drift_drop)
        for entry in replay.entries(after=max(0, cursor - LOOK_BACK), up_to=cursor):
            self._add(entry)
        self.detector.restart()
        self._followed = cursor

    def follow(self) -> None:
        """Take the answers that are new."""
        for entry in self.replay.entries(after=self._followed):
            self.drifted |= self._add(entry)
            self._followed = entry.number

    def restart(self) -> None:
        """Note an update."""
        self.drifted = False
        self.detector.restart()

    def _add(self, entry: LogEntry) -> bool:
        cluster = entry.tenant_hash if self.config.drift_by == "tenant" else entry.domain
        return self.detector.add(cluster, entry.tried, entry.accepted)


def _decayed(sums: tuple[float, float], span: float, accepted: int, tried: int) -> tuple[float, float]:
    keep = 1 - 1 / span
    return keep * sums[0] + accepted, keep * sums[1] + tried


def _ratio(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1] if sums[1] > 0 else 0.0
