"""Estimate of the seconds that a refused client should wait."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

RECENT = 64  # ended answers over which the gap is averaged
LONGEST_S = 120  # the rate may change, so a client never waits longer


class RetryAfterEstimator:
    """Mean gap between the ends of recent answers, since the server was last idle.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=RECENT + 1)  # start of work or end of an answer, then later ends

    def begin(self) -> None:
        """Forget the past: work starts after an idle time."""
        self._times.clear()
        self._times.append(self._clock())

    def ended(self, answers: int) -> None:
        """Note that so many answers gave up their places now."""
        self._times.extend([self._clock()] * answers)

    def seconds_until(self, ends: int) -> int:
        """Estimate the whole seconds until `ends` more answers will have ended, from 1 to `LONGEST_S`.

        1 while no answer has ended yet.
        """
        seen = len(self._times) - 1
        if seen < 1:
            return 1
        gap_s = (self._clock() - self._times[0]) / seen
        return min(LONGEST_S, max(1, math.ceil(ends * gap_s)))
