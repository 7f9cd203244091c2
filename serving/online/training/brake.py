"""Brake of the embedded trainer: its process stands still while requests run, but for a small share of the time.

Time in which no request ran counts: a trainer that had more than its share then stands still beside requests. It runs
all the time while its work is urgent: a draft in service that is suspected.

A low priority does not protect requests on a CPU. The engine's threads wait for the one whose core the trainer has, and
both read through one memory: a trainer at niceness 10 made tokens half as fast (`docs/lab-notes.md`).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress

PERIOD_S = 0.5  # of a stop and a run. Short, so that a trainer that holds a lock of a database gives it back soon
SMALLEST_SHARE = 0.01  # for the same reason
# A stop and a run while the trainer is ahead of its share. Five milliseconds of it cost a step of the engine fifteen.
STILL_S, RELEASE_S = 5.0, 0.01
AHEAD_S = 60.0  # beside requests, for which a trainer may be ahead of its share
CAN_STOP = sys.platform == "linux"  # elsewhere nothing would end a stopped trainer whose server was killed


class Brake:
    """Stops the process group `pid()` while requests run. A thread of its own does.

    Args:
        pid: returns the trainer's process id, None while none runs.
        share: of the time that it runs beside requests.
        send: sends a signal to a process group.
    """

    def __init__(
        self,
        pid: Callable[[], int | None],
        share: float,
        send: Callable[[int, signal.Signals], None] = os.killpg,
    ) -> None:
        self._pid, self._share, self._send = pid, max(share, SMALLEST_SHARE), send
        self._changed = threading.Condition()
        self._busy = self._urgent = self._ending = False
        self._ahead_s = 0.0  # that it ran between requests, and has not stood still for beside them
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self.stops:
            self._thread = threading.Thread(target=self._run, name="trainer-brake", daemon=True)
            self._thread.start()

    def set_busy(self, busy: bool) -> None:
        """Say whether requests run. Costs nothing while that does not change."""
        if busy != self._busy:
            with self._changed:
                self._busy = busy
                self._changed.notify()

    def set_urgent(self, urgent: bool) -> None:
        """Say whether requests should wait for the trainer."""
        if urgent != self._urgent:
            with self._changed:
                self._urgent = urgent
                self._changed.notify()

    def release(self) -> None:
        """Let the trainer run for good. It can be ended then."""
        with self._changed:
            self._ending = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    @property
    def stops(self) -> bool:
        """True if the trainer stands still beside requests."""
        return CAN_STOP and self._share < 1

    @property
    def _holds(self) -> bool:
        return self._busy and not self._urgent

    def _run(self) -> None:
        while not self._ending:
            idle_since_s = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._holds or self._ending)
            self._count_idle(time.monotonic() - idle_since_s)
            still_s, running_s = self._next_period()
            self._tell(signal.SIGSTOP)
            self._wait_for_idle(still_s)
            self._tell(signal.SIGCONT)
            self._wait_for_idle(running_s)

    def _count_idle(self, seconds: float) -> None:
        if self._pid() is not None:
            self._ahead_s = min(self._ahead_s + seconds, AHEAD_S * self._share)

    def _next_period(self) -> tuple[float, float]:
        """Return how long the trainer stands still, and then runs: next to nothing while it is ahead of its share."""
        due_s = (STILL_S + RELEASE_S) * self._share
        if self._ahead_s < due_s:
            return PERIOD_S * (1 - self._share), PERIOD_S * self._share
        self._ahead_s -= due_s
        return STILL_S, RELEASE_S

    def _wait_for_idle(self, seconds: float) -> None:
        with self._changed:
            self._changed.wait_for(lambda: not self._holds or self._ending, seconds)

    def _tell(self, which: signal.Signals) -> None:
        pid = self._pid()
        if pid is not None:
            with suppress(ProcessLookupError, PermissionError):  # it ended, or is not yet a group of its own
                self._send(pid, which)
