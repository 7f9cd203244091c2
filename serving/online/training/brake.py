"""Brake of the embedded trainer: its process stands still while requests run, but for a small share of the time.

Time in which no request ran counts: a trainer that had more than its share then stands still beside requests. Its share
is larger while its work is urgent: a draft in service that is suspected.

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

PERIOD_S = 0.5  # of a stop and a run. Short, so that a trainer that holds a lock gives it back soon
SMALLEST_SHARE = 0.01  # for the same reason
# The longest stop of a trainer that is ahead of its share, and the run after it, long enough to end a transaction. A
# run of five milliseconds costs a step of the engine fifteen.
STILL_S, RELEASE_S = 5.0, 0.01
URGENT_SHARE = 0.5  # at least, while its work is urgent. Beside a trainer that runs, tokens take eight times as long
AHEAD_S = 60.0  # beside requests, after which a trainer is not ahead any more, however long it ran between them
CAN_STOP = sys.platform == "linux"  # elsewhere nothing would end a stopped trainer whose server was killed


class Brake:
    """Stops the process group `pid()` while requests run. A thread of its own does.

    Args:
        pid: returns the trainer's process id, None while none runs.
        share: of the time that it runs beside requests.
        send: sends a signal to a process group.
        holds_lock: returns True if the trainer may hold a lock that others wait for. Its stops are short then.
    """

    def __init__(
        self,
        pid: Callable[[], int | None],
        share: float,
        send: Callable[[int, signal.Signals], None] = os.killpg,
        holds_lock: Callable[[], bool] = lambda: False,
    ) -> None:
        self._pid = pid
        self._share = max(share, SMALLEST_SHARE)
        self._send = send
        self._holds_lock = holds_lock
        self._changed = threading.Condition()
        self._busy = self._urgent = self._ending = False
        self._ahead_s = 0.0  # that it ran between requests, and has not yet made up for by standing still beside them
        self._stopped_s = 0.0  # in stops that are over
        self._stopped_at_s: float | None = None  # None: it is not stopped now
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
        """Say whether requests should leave the trainer a larger share."""
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
    def stopped_s(self) -> float:
        """Seconds that trainers have stood still so far."""
        with self._changed:
            return self._stopped_s + (0.0 if self._stopped_at_s is None else time.monotonic() - self._stopped_at_s)

    def _run(self) -> None:
        while not self._ending:
            idle_since_s = time.monotonic()
            with self._changed:
                self._changed.wait_for(lambda: self._busy or self._ending)
            self._count_idle(time.monotonic() - idle_since_s)
            self._brake()

    def _brake(self) -> None:
        """Let the trainer stand still, and then run, until the period or the requests end, or its urgency changes."""
        began_s, urgent = time.monotonic(), self._urgent
        share = max(self._share, URGENT_SHARE) if urgent else self._share
        is_ahead = not urgent and self._ahead_s >= PERIOD_S * share
        pid = self._pid()
        stopped = pid is not None and self._tell(pid, signal.SIGSTOP)
        self._stopped_at_s = time.monotonic() if stopped else None
        try:
            still_s, running_s = self._next_period(share, is_ahead, stopped)
            self._wait(still_s, urgent)
        finally:
            if pid is not None and stopped:
                self._count_stop()
                self._tell(pid, signal.SIGCONT)
        self._wait(running_s, urgent)
        if is_ahead and stopped:
            self._ahead_s -= (time.monotonic() - began_s) * self._share

    def _next_period(self, share: float, is_ahead: bool, stopped: bool) -> tuple[float, float]:
        """Return how long the trainer stands still, and then runs: next to nothing while it is ahead of its share."""
        if not is_ahead or (stopped and self._others_wait()):
            return PERIOD_S * (1 - share), PERIOD_S * share
        if not stopped:  # it may be there soon
            return PERIOD_S - RELEASE_S, RELEASE_S
        return min(STILL_S, self._ahead_s / self._share), RELEASE_S

    def _others_wait(self) -> bool:
        try:
            return self._holds_lock()
        except OSError:  # no file can be opened, perhaps
            return True

    def _count_stop(self) -> None:
        with self._changed:
            assert self._stopped_at_s is not None, "it was stopped"
            self._stopped_s += time.monotonic() - self._stopped_at_s
            self._stopped_at_s = None

    def _count_idle(self, seconds: float) -> None:
        if self._pid() is not None:
            self._ahead_s = min(self._ahead_s + seconds, AHEAD_S * self._share)

    def _wait(self, seconds: float, urgent: bool) -> None:
        """Wait until no request runs, or the work is urgent no more, or has become so."""
        with self._changed:
            self._changed.wait_for(lambda: not self._busy or self._ending or self._urgent != urgent, seconds)

    def _tell(self, pid: int, which: signal.Signals) -> bool:
        """Return True if the signal was sent."""
        try:
            self._send(pid, which)
        except (ProcessLookupError, PermissionError):  # it ended, or is not yet a group of its own
            return False
        return True
