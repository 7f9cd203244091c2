"""Brake on wrong keys, by client address."""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from distillspec.serving.server.http.errors import ApiError

log = logging.getLogger(__name__)

SLOWED_DOWN = "too_many_wrong_keys"  # error code
MOST = 10.0  # wrong keys of an address before its brake begins
HALF_LIFE_S = 60.0  # in which half of the counted wrong keys are forgotten
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
ADDRESSES = 4096  # kept. Those with the oldest wrong keys are dropped first


@dataclass
class _Guesses:
    """Wrong keys of an address."""

    at_s: float  # the last one
    count: float = 0.0  # decayed
    pause_s: float = 0.0  # the last pause. 0: the brake is off
    until_s: float = -math.inf  # end of that pause

    def add(self, now_s: float) -> None:
        """Count a wrong key. The bound lets the brake end a minute after the last one, however many there were."""
        self.count = min(2 * MOST, self.count * 0.5 ** ((now_s - self.at_s) / HALF_LIFE_S) + 1)
        self.at_s = now_s


class WrongKeys:
    """Wrong keys by client address. Used on the event loop alone.

    After `MOST` wrong keys of an address, those that follow are answered with 429 for a pause, which doubles with each
    wrong key after it. Right keys always pass, and never come here.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, _Guesses] = OrderedDict()  # by address, the newest wrong key last

    def __len__(self) -> int:
        return len(self._seen)

    def check(self, address: str, *, given: bool) -> None:
        """Note a refused request of this address. Its key was wrong (`given`) or missing, which does not count.

        Raises:
            ApiError: 429 with Retry-After while the address is to pause.
        """
        now_s = self._clock()
        seen = self._seen.get(address)
        paused_s = 0.0 if seen is None else seen.until_s - now_s
        if given:
            self._count(address, now_s, paused=paused_s > 0)
        if paused_s > 0:
            wait_s = math.ceil(paused_s)
            raise ApiError(
                429,
                f"too many wrong API keys came from this address; try again in {wait_s} s, or send a right key now",
                kind="rate_limit_exceeded",
                code=SLOWED_DOWN,
                headers={"Retry-After": str(wait_s)},
            )

    def _count(self, address: str, now_s: float, *, paused: bool) -> None:
        seen = self._seen.setdefault(address, _Guesses(now_s))
        self._seen.move_to_end(address)
        if len(self._seen) > ADDRESSES:
            self._seen.popitem(last=False)
        seen.add(now_s)
        if paused:
            return
        if seen.count < MOST:
            seen.pause_s = 0.0
            return
        if not seen.pause_s:
            log.warning("many wrong API keys: slowed down", extra={"fields": {"address": address}})
        seen.pause_s = min(LONGEST_PAUSE_S, 2 * seen.pause_s or FIRST_PAUSE_S)
        seen.until_s = now_s + seen.pause_s
