"""Work for the target between the engine's steps, mostly while it has nothing better to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from distillspec.serving.engine import Engine

T = TypeVar("T")


class Stopped(Exception):
    """The work was not done: the adaptation is ending."""


class BetweenSteps:
    """Runs pieces of work in the engine's own thread, one between two steps, at most `busy_share` of its time.

    `wake` is called when there is work: a loop that sleeps while no request runs would not notice it.
    """

    def __init__(self, engine: Engine, busy_share: float, wake: Callable[[], None] | None = None) -> None:
        self.engine, self.busy_share = engine, busy_share
        self._wake = wake or (lambda: None)
        self._stopping = threading.Event()

    def run(self, work: Callable[[], T]) -> T:
        """Have the engine's loop do `work`, and wait for it; what it raises is raised here.

        Raises:
            Stopped: nobody will do it any more.
        """
        done = threading.Event()
        found: list[T] = []
        failures: list[Exception] = []
        spent = 0.0

        def do() -> None:
            nonlocal spent
            if self._stopping.is_set():
                done.set()
                return
            started = time.monotonic()
            try:
                found.append(work())
            except Exception as error:
                failures.append(error)
            spent = time.monotonic() - started
            done.set()

        self.engine.core.at_next_step(do)
        self._wake()
        while not done.wait(0.1):
            if self._stopping.is_set():
                raise Stopped
        if failures:
            raise failures[0]
        if not found:
            raise Stopped
        if self.engine.core.roster.sequences and self._stopping.wait(spent * (1 / self.busy_share - 1)):
            raise Stopped
        return found[0]

    def soon(self, work: Callable[[], None]) -> None:
        """Have `work` done before the next step; nobody waits for it."""
        self.engine.core.at_next_step(work)
        self._wake()

    def stop(self) -> None:
        self._stopping.set()
