"""Costs that follow the machine: a Kalman filter on the knots of a cost table, fed with live step times."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy

from distillspec.serving.costs.table import KNOTS, CostTable
from distillspec.types import Floats

LEAST_S = 1e-6  # times below are not told apart
LEAST_SHARE = 0.05  # of a first pass that each pass may cost, where a table has less
FULL_CONTEXT = 20_000.0  # cached tokens that may cost as much as a whole pass over one token, where nothing is known
NOISE = 0.05  # usual relative error of one step's time
WANDER, KNOT_WANDER = 0.01, 0.002  # relative change a step: of the machine's speed, and of the knots that were seen
ALERT_STEPS = 64  # the first steps are all taken in
TAKEN_EVERY = 4  # later, of steps that are like the last one taken in, one of so many
ALIKE = 0.25  # relative difference of the tokens of such steps
SURE_ERROR = 0.35  # relative standard error of a prediction that can be judged by

SPIKE = 4.0  # residuals are clipped to so many times the usual one
QUICK = 0.1  # weight of a new residual in the usual one


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
        limit = SPIKE * max(self._usual, LEAST_S)
        self._usual += QUICK * (min(abs(residual), 2 * limit) - self._usual)
        return min(max(residual, -limit), limit)


@dataclass(frozen=True)
class Trust:
    """Relative standard deviations of a table's errors, and of a usual first residual (None: the first one's own)."""

    speed: float  # of all costs alike
    parts: float  # of the fixed part and of the part by tokens, each
    knot: float  # of each knot by itself
    context: float
    first: float  # of what a first pass takes more, as a share of a pass over one token
    residual: float | None


MEASURED, GUESSED = Trust(0.3, 0.05, 0.05, 0.3, 0.3, 0.1), Trust(1.0, 1.0, 0.1, 1.0, 1.0, None)


class LiveCosts:
    """One model's `CostTable`, corrected by the times of live steps.

    The state are the seconds of each knot, of context, of rows and of first passes, relative to the table's. All may
    be off together (the machine's speed, which is followed fast), by the fixed part, by the part by tokens, or each
    alone (slowly). A measurement corrects what it depends on, in proportion to how uncertain that is (Kalman 1960).
    Residuals far beyond the usual are clipped: a pause of the machine is no new machine.

    Args:
        prior: measured or guessed costs.
        trust: the errors that the prior may have.
    """

    def __init__(self, prior: CostTable, trust: Trust = MEASURED) -> None:
        self._knots, self._recorded = numpy.array(KNOTS, dtype=numpy.float64), prior.recorded
        start_s = prior.by_tokens(self._knots)
        least_s = [max(start_s[0] / FULL_CONTEXT, prior.per_context), prior.per_row, start_s[0] + prior.first]
        # A small draft may have been measured to cost nothing but a first pass. In such a unit no knot could rise.
        seen_s = numpy.maximum(start_s, LEAST_SHARE * (start_s[0] + prior.first))
        self._unit = numpy.maximum(numpy.append(seen_s, least_s), LEAST_S / 1e4)
        self._state = numpy.append(start_s, [prior.per_context, prior.per_row, prior.first]) / self._unit
        # The covariance of the state's errors: what is off together, by its shares, and each entry alone.
        fixed = numpy.append(start_s[0] / numpy.maximum(start_s, LEAST_S), [0.0, 1.0, 0.0])
        by_tokens = numpy.append(1 - fixed[:-3], [0.0, 0.0, 0.0])
        speed = numpy.append(numpy.ones(len(KNOTS)), [self._state[-3], 1.0, self._state[-1]])
        alone = numpy.append(numpy.full(len(KNOTS), trust.knot), [trust.context, 0.0, trust.first])
        self._covariance = trust.speed**2 * numpy.outer(speed, speed)
        self._covariance += trust.parts**2 * (numpy.outer(fixed, fixed) + numpy.outer(by_tokens, by_tokens))
        self._covariance += numpy.diag(alone) ** 2
        self._clip = OutlierClip(trust.residual)
        self._table = self._state, prior  # made of this state
        self._observed = 0  # steps
        self._last_tokens = 0.0  # of the last step taken in
        self._last_knots = [0, 1]  # places of those that its last pass lay between
        self._sure = False

    @property
    def table(self) -> CostTable:
        """The present estimate. Other threads may read it."""
        state, (made_of, table) = self._state, self._table
        if made_of is state:
            return table
        *seconds, per_context, per_row, first = numpy.maximum(state * self._unit, 0.0).tolist()
        rising = accumulate(seconds, max)  # as in `CostTable.rising`
        found = CostTable(tuple(zip(KNOTS, rising, strict=True)), per_context, per_row, first, self._recorded)
        self._table = state, found
        return found

    def observe(
        self, context: float, passes: Sequence[float], seconds: float, rows: float = 0, *, first: bool = False
    ) -> bool:
        """Learn what passes over so many tokens each took, with `context` tokens cached and `rows` rows in all.

        `first`: the first of them is a draft's, which takes longer than the others.

        Times that no clock should give (negative, not finite) are left out. Return True if the prediction was sure
        enough to judge by.
        """
        if not passes or not 0 <= seconds < float("inf"):
            return False
        self._observed += 1
        passes = list(map(self._recorded.up, passes))
        tokens = sum(passes)
        like_last = abs(tokens - self._last_tokens) <= ALIKE * self._last_tokens
        if like_last and self._observed > ALERT_STEPS and self._observed % TAKEN_EVERY:
            return self._sure
        self._last_tokens = tokens
        work = self._work(context, passes, rows, first)
        predicted = max(float(work @ self._state), LEAST_S)
        shift = self._covariance @ work
        variance = float(work @ shift)
        gain = shift / (variance + (NOISE * predicted) ** 2)
        self._state = self._state + gain * (predicted * self._clip(seconds / predicted - 1))
        wandered = WANDER * self._state
        self._covariance += numpy.array([wandered, -gain]).T @ numpy.array([wandered, shift])
        self._covariance[self._last_knots, self._last_knots] += KNOT_WANDER**2
        self._sure = variance**0.5 < SURE_ERROR * predicted
        return self._sure

    def _work(self, context: float, passes: Sequence[float], rows: float, first: bool) -> Floats:
        """Return the seconds that the passes take for each unit of the state, and note the knots they depend on."""
        weights = [0.0] * len(self._unit)
        self._last_knots = []
        for tokens in passes:
            after = min(max(bisect_left(KNOTS, tokens), 1), len(KNOTS) - 1)
            share = max(0.0, (tokens - KNOTS[after - 1]) / (KNOTS[after] - KNOTS[after - 1]))
            weights[after - 1] += 1 - share
            weights[after] += share
            self._last_knots = [after - 1, after]
        weights[-3:] = [context, rows, float(first)]
        return numpy.array(weights) * self._unit
