"""Work for the target between the engine's steps, for a bounded share of its time."""

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
    """Runs work in the engine's thread, one piece between two steps, for at most `busy_share` of its time.

    Args:
        wake: called when there is work. It wakes a loop that sleeps while no request runs.
    """

    def __init__(self, engine: Engine, busy_share: float, wake: Callable[[], None] | None = None) -> None:
        self.engine, self.busy_share = engine, busy_share
        self._wake = wake or (lambda: None)
        self._stopping = threading.Event()

    def run(self, work: Callable[[], T]) -> T:
        """Run `work` in the engine's thread, wait for it and return its result.

        Raises:
            Stopped: it will not be done any more. Besides, what `work` raises.
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

        self.engine.at_next_step(do)
        self._wake()
        while not done.wait(0.1):
            if self._stopping.is_set():
                raise Stopped
        if failures:
            raise failures[0]
        if not found:
            raise Stopped
        if self.engine.sequences.unfinished and self._stopping.wait(spent * (1 / self.busy_share - 1)):
            raise Stopped
        return found[0]

    def soon(self, work: Callable[[], None]) -> None:
        """Run `work` before the next step. Does not wait for it."""
        self.engine.at_next_step(work)
        self._wake()

    def stop(self) -> None:
        self._stopping.set()
