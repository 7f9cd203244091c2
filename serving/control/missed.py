"""By what factor predictions miss what is measured."""

from __future__ import annotations

from distillspec.serving.control.spikes import SpikeCut

MEMORY = 0.998  # of what predictions missed, a step
FIRST_MISS = 0.5  # what a prediction is taken to miss usually, before it was seen


class Missed:
    """By what factor predictions miss, from sums that forget: measured over predicted, and how sure that is.

    A step far from the usual (a pause of the machine, a pass that is compiled) counts as a few usual misses.
    """

    def __init__(self) -> None:
        self._measured = self._predicted = 1.0
        self._squares = 0.0
        self._cut = SpikeCut(FIRST_MISS)
        self.seen = 0

    @property
    def factor(self) -> float:
        return self._measured / self._predicted

    @property
    def relative_error(self) -> float:
        """Standard error of `factor`, relative."""
        return self._squares**0.5 / max(self._measured, 1e-9)

    def age(self) -> None:
        """A step has passed, whether it told anything or not."""
        self._measured *= MEMORY
        self._predicted *= MEMORY
        self._squares *= MEMORY**2

    def observe(self, measured: float, predicted: float) -> None:
        """Times that no clock should give (negative, not finite) are left out."""
        if predicted <= 0 or not 0 <= measured < float("inf"):
            return
        self.seen += 1
        miss = self._cut(measured / predicted - self.factor)
        self._measured += self.factor + miss
        self._predicted += 1.0
        self._squares += miss**2
