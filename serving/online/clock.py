"""Time that goes on evenly, whatever is done to the machine's clock."""

from __future__ import annotations

import time
from collections.abc import Callable


class SteadyClock:
    """Seconds since the epoch as they were at the start, and from there by the monotonic clock.

    A wall clock set forward or back while this runs changes nothing; one that stands before `not_before` (the newest
    record, made before a restart) is taken to stand at it.
    """

    def __init__(
        self,
        not_before: float = 0.0,
        wall: Callable[[], float] | None = None,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady = steady
        self._offset = max((wall or time.time)(), not_before) - steady()

    def __call__(self) -> float:
        return self._steady() + self._offset
