"""Heartbeat of the trainer: it touches a file as it works, and the server counts how long that file stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from distillspec.files import private_file

PATIENCE_S = 600.0  # of silence, beyond the longest one that ended by itself
MOST_AT_ONCE_S = 10.0  # of silence, counted between two checks: if they are further apart, the server stood still too

T = TypeVar("T")


def beat(path: Path) -> None:
    """Show that the trainer works."""
    with suppress(OSError):  # the disk may be what is full
        private_file(path)


def beating(path: Path, function: Callable[[T], Any]) -> Callable[[T], None]:
    """Return a function that beats, and then calls `function`."""

    def called(given: T) -> None:
        beat(path)
        function(given)

    return called


class Heartbeat:
    """Counts the silence of a trainer, while it could run and somebody looked.

    The file's time is compared with itself alone, so setting the machine's clock changes nothing.

    Args:
        path: that the trainer touches at each step of learning, each lot of judged answers, and while it waits.
        stopped_s: returns for how many seconds in all trainers were stopped.
        clock: seconds that only grow.
    """

    def __init__(self, path: Path, stopped_s: Callable[[], float], clock: Callable[[], float]) -> None:
        self._path = path
        self._stopped_s = stopped_s
        self._clock = clock
        self.longest_s = 0.0  # silence that ended by itself
        self.begin()

    def begin(self) -> None:
        """Start to count anew: another trainer begins."""
        self.silent_s = 0.0
        self._seen = self._last()
        self._looked_at_s = self._clock()
        self._stopped_before_s = self._stopped_s()

    def is_lost(self) -> bool:
        """Look at the file. Return True if it has stayed as it is for so long that the trainer must hang."""
        now_s, stopped_s = self._clock(), self._stopped_s()
        watched_s = min(now_s - self._looked_at_s, MOST_AT_ONCE_S) - (stopped_s - self._stopped_before_s)
        self._looked_at_s, self._stopped_before_s = now_s, stopped_s
        self.silent_s += max(0.0, watched_s)
        if (seen := self._last()) != self._seen:
            self.longest_s = max(self.longest_s, self.silent_s)
            self._seen, self.silent_s = seen, 0.0
        return self.silent_s > PATIENCE_S + self.longest_s

    def _last(self) -> int:
        try:
            return self._path.stat().st_mtime_ns
        except OSError:  # no trainer has worked here yet
            return 0
