"""The drift detector's way through the log: every logged answer, once."""

from __future__ import annotations

from distillspec.config import AdaptConfig
from distillspec.serving.online.log.records import LogEntry
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.training.drift import DriftDetector

LOOK_BACK = 1024  # answers. Earlier ones no longer weigh in the drift detector's long average.


class DriftWatch:
    """Follows the log. Nothing is learnt here.

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
        cluster = entry.tenant if self.config.drift_by == "tenant" else entry.domain
        return self.detector.add(cluster, entry.tried, entry.accepted)
