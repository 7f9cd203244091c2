"""Prediction bias: the factor between measured and predicted values."""

from __future__ import annotations

from distillspec.serving.costs.live_costs import OutlierClip

MEMORY = 0.998  # weight of a step's errors after the next step
FIRST_MISS = 0.5  # usual relative error before any was measured


class PredictionBias:
    """Factor of measured over predicted values, with its standard error, from sums with exponential forgetting.

    Outliers (a pause of the machine, a pass that is compiled) are clipped.
    """

    def __init__(self) -> None:
        self._measured = self._predicted = 1.0
        self._squares = 0.0
        self._cut = OutlierClip(FIRST_MISS)
        self.seen = 0

    @property
    def factor(self) -> float:
        return self._measured / self._predicted

    @property
    def relative_error(self) -> float:
        """Relative standard error of `factor`."""
        return self._squares**0.5 / max(self._measured, 1e-9)

    def age(self) -> None:
        """Count a step, whether it was measured or not."""
        self._measured *= MEMORY
        self._predicted *= MEMORY
        self._squares *= MEMORY**2

    def observe(self, measured: float, predicted: float) -> None:
        """Learn from one measurement. Negative and non-finite values are ignored."""
        if predicted <= 0 or not 0 <= measured < float("inf"):
            return
        self.seen += 1
        miss = self._cut(measured / predicted - self.factor)
        self._measured += self.factor + miss
        self._predicted += 1.0
        self._squares += miss**2
