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
        self._squares = 0.0  # of misses
        self._last_step = 0
        self._clip = OutlierClip(FIRST_MISS)
        self.factor = 1.0
        self.seen = 0.0  # the sum of weights

    @property
    def relative_error(self) -> float:
        """Relative standard error of `factor`."""
        return self._squares**0.5 / max(self._measured, 1e-9)

    def observe(self, measured: float, predicted: float, step: int, weight: float = 1.0) -> None:
        """Learn from one measurement at a step, counted from any. Negative and non-finite values are ignored.

        Args:
            weight: what it tells, at most 1.
        """
        if predicted <= 0 or not 0 <= measured < float("inf"):
            return
        stays = MEMORY ** (step - self._last_step)
        self._last_step = step
        miss = self._clip(measured / predicted - self.factor)
        self._measured = stays * self._measured + weight * (self.factor + miss)
        self._predicted = stays * self._predicted + weight
        self._squares = stays**2 * self._squares + (weight * miss) ** 2
        self.factor = self._measured / self._predicted
        self.seen += weight
