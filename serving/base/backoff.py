"""Exponential backoff, counted in steps."""

from __future__ import annotations

FIRST_WAIT_STEPS, MOST_WAIT_STEPS = 4, 256


class Backoff:
    """Waits 4, 8, 16, … steps after failures in a row.

    Successes, as many as the last wait had steps, reset the next wait to 4.
    """

    def __init__(self, first: int = FIRST_WAIT_STEPS, most: int = MOST_WAIT_STEPS) -> None:
        self.first, self.most = first, most
        self._wait = self._left = self._successes = 0

    @property
    def waits(self) -> bool:
        """True while it is too soon to try again."""
        return self._left > 0

    @property
    def fails(self) -> bool:
        """True from a failure on until enough successes have followed."""
        return self._wait > 0

    def step(self) -> None:
        """Count a step of waiting."""
        self._left = max(0, self._left - 1)

    def failed(self) -> int:
        """Count a failure. Return the steps to wait."""
        self._wait = min(max(self.first, 2 * self._wait), self.most)
        self._left, self._successes = self._wait, 0
        return self._wait

    def succeeded(self) -> None:
        """Count a success."""
        self._successes += 1
        if self._successes >= self._wait:
            self._wait = 0
