"""Prediction bias: the factor between measured and predicted values."""

from __future__ import annotations

SPIKE = 4.0  # residuals are clipped to so many times the usual one
QUICK = 0.1  # weight of a new residual in the usual one
LEAST = 1e-6  # residuals below are never clipped


class OutlierClip:
    """Clips residuals to a few times their usual size, which is learnt.

    Args:
        usual: initial size of a usual residual, None for that of the first.
    """

    def __init__(self, usual: float | None = None) -> None:
        self._usual = usual

    def __call__(self, residual: float) -> float:
        """The residual, no further from zero than a few usual ones."""
        if self._usual is None:
            self._usual = abs(residual)
        limit = SPIKE * max(self._usual, LEAST)
        self._usual += QUICK * (min(abs(residual), 2 * limit) - self._usual)
        return min(max(residual, -limit), limit)


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
