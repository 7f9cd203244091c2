"""Cutting what is far from the usual: a pause of the machine is no new machine."""

from __future__ import annotations

SPIKE = 4.0  # residuals beyond so many usual ones are cut to that
QUICK = 0.1  # how fast the usual residual follows
LEAST = 1e-6  # below which nothing is unusual


class SpikeCut:
    """Cuts residuals to a few usual ones, and follows what is usual.

    Args:
        usual: the size of a usual residual; None: that of the first.
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
