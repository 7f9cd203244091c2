"""Drift of the traffic: short and long averages of acceptance by domain or tenant, over every logged answer once."""

from __future__ import annotations

from typing import NamedTuple

from distillspec.config import AdaptConfig
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog

SHORT, LONG = 24.0, 240.0  # requests over which the weights decay by a factor e
SETTLED = 48  # requests of a cluster before its averages are compared
LOOK_BACK = 1024  # answers. Earlier ones no longer weigh in the long average.


class _DecayedSums(NamedTuple):
    """Accepted and tried tokens of requests, whose weights decay."""

    accepted: float = 0.0
    tried: float = 0.0

    @property
    def alpha(self) -> float:
        """Accepted over tried tokens, without bias at the start. 0 before the first request."""
        return self.accepted / self.tried if self.tried > 0 else 0.0

    def after(self, tried: int, accepted: int, span: float) -> _DecayedSums:
        """Return the sums with one more request. Weights decay by a factor e over `span` requests."""
        keep = 1 - 1 / span
        return _DecayedSums(keep * self.accepted + accepted, keep * self.tried + tried)


class ShortLongAverages:
    """α of the latest requests, and over a longer time. Requests count by their drafted tokens.

    Attributes:
        count: requests since the start or the last restart.
    """

    def __init__(self) -> None:
        self._short = _DecayedSums()
        self._long = _DecayedSums()
        self.count = 0

    @property
    def short(self) -> float:
        """α over about the last `SHORT` requests."""
        return self._short.alpha

    @property
    def long(self) -> float:
        """α over about the last `LONG` requests."""
        return self._long.alpha

    def add(self, tried: int, accepted: int) -> None:
        """Count a request."""
        self._short = self._short.after(tried, accepted, SHORT)
        self._long = self._long.after(tried, accepted, LONG)
        self.count += 1

    def restart(self) -> None:
        """Take the present α as the new long average."""
        self._long = self._short
        self.count = 0


class DriftDetector:
    """Detects drops of acceptance in finished requests, which `add` takes in order.

    Args:
        drop: of α, short against long average, that counts as drift.
    """

    def __init__(self, drop: float) -> None:
        self.drop = drop
        self._clusters: dict[str, ShortLongAverages] = {}

    def add(self, cluster: str, tried: int, accepted: int) -> bool:
        """Count a request. Return True if α of its cluster or of all traffic has dropped by more than `drop`.

        A new domain shows in all traffic first: it has no long average of its own.
        """
        if tried == 0:
            return False
        dropped = False
        for name in {cluster, ""}:
            averages = self._clusters.setdefault(name, ShortLongAverages())
            averages.add(tried, accepted)
            if averages.count >= SETTLED and averages.long - averages.short > self.drop:
                dropped = True
        return dropped

    def averages(self) -> dict[str, tuple[float, float]]:
        """Return cluster → short and long α. The cluster "" is all traffic."""
        return {name: (averages.short, averages.long) for name, averages in self._clusters.items()}

    def restart(self) -> None:
        """Take the present α as the new long average. An update answers a drop only once."""
        for averages in self._clusters.values():
            averages.restart()


class DriftWatch:
    """The detector's way through the log. Nothing is learnt here.

    Args:
        cursor: number of the last answer that an update has learnt from. It answered any drop until then.

    Attributes:
        drifted: True if acceptance has dropped since the last update.
    """

    def __init__(self, config: AdaptConfig, replay: ReplayLog, cursor: int) -> None:
        self.config = config
        self.replay = replay
        self.drifted = False
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
