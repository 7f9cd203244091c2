"""How fast answers end, for those who are told to come back later."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable

RECENT = 64  # ends that the pace is taken from
LONGEST_S = 120  # nobody is sent away for longer: the pace may change


class Pace:
    """The time between recent ends of answers, since there was last nothing to do.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._times: deque[float] = deque(maxlen=RECENT + 1)  # when work began or an answer ended, then later ends

    def begin(self) -> None:
        """There is work again after there was none."""
        self._times.clear()
        self._times.append(self._clock())

    def ended(self, answers: int) -> None:
        """So many answers gave their places back."""
        self._times.extend([self._clock()] * answers)

    def seconds_until(self, ends: int) -> int:
        """Whole seconds until so many more answers will have ended, at least 1; 1 while none has ended yet."""
        seen = len(self._times) - 1
        if seen < 1:
            return 1
        gap_s = (self._clock() - self._times[0]) / seen
        return min(LONGEST_S, max(1, math.ceil(ends * gap_s)))
