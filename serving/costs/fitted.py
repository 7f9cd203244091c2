"""Cost tables fitted to timed passes, and how far they are off where they were not fitted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy
from scipy.optimize import nnls

from distillspec.serving.base.ladder import EXACT, Ladder
from distillspec.serving.costs.table import CostTable

APART = 1.15  # least ratio of two knots of a fitted table
ROWS_MATTER = 0.8  # a fit with a cost of rows is taken where its error is below this share of the other's


@dataclass(frozen=True)
class Timed:
    """Work that was timed: `passes` forward passes over `tokens` tokens of `rows` rows with `context` tokens cached.

    All are sums over the passes.
    """

    context: float
    tokens: float
    passes: float
    seconds: float  # median over rounds
    rows: float = 0
    held_out: bool = False  # not seen by the fit
    # Of a verification: seconds over those of the plain pass beside it, with its 95 % interval.
    over_plain: tuple[float, float, float] | None = None


@dataclass(frozen=True)
class Fitted:
    """A model's cost table, and how far it is off where it was not fitted."""

    cost: CostTable
    held_out_error: float  # median of |predicted / measured − 1| on the held-out points
    points: tuple[Timed, ...]

    def predicted(self, point: Timed) -> float:
        """Seconds that the table gives for a point's work."""
        sums = (point.context, point.tokens, point.rows)
        return self.cost.first + point.passes * self.cost.seconds(*[total / point.passes for total in sums])

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Fitted:
        points = tuple(Timed(**{**point, "over_plain": _interval(point["over_plain"])}) for point in stored["points"])
        return cls(CostTable.from_json(stored["cost"]), float(stored["held_out_error"]), points)


def fit(points: Sequence[Timed], recorded: Ladder = EXACT) -> Fitted:
    """Fit a table of least squared relative error to the points that are not held out, with no cost below 0.

    Knots are numbers of tokens that were timed. A cost of rows is fitted where it clearly lowers the error.

    Args:
        points: with the tokens that passes computed.
        recorded: numbers of tokens that passes are recorded in.

    Raises:
        ValueError: there are less than two numbers of tokens, or a time is not above 0.
    """
    seen = [point for point in points if not point.held_out]
    if not seen or min(point.seconds for point in points) <= 0:
        raise ValueError("nothing to fit: no points, or times that are not above 0")
    cost = _fitted_table(seen, by_row=False)
    if len({point.rows / point.passes for point in seen}) > 1:  # else they cannot be told from the fixed part
        with_rows = _fitted_table(seen, by_row=True)
        if _error(with_rows, seen) < ROWS_MATTER * _error(cost, seen):
            cost = with_rows
    cost = replace(cost, recorded=recorded)
    return Fitted(cost, _error(cost, [point for point in points if point.held_out] or seen), tuple(points))


def _fitted_table(points: Sequence[Timed], by_row: bool) -> CostTable:
    """Fit the seconds of the first knot and the rise to each further one, each ≥ 0."""
    knots = _knots([point.tokens / point.passes for point in points])
    unit_rises = [CostTable(tuple((at, float(at >= knot)) for at in knots)) for knot in knots]  # of a second at a knot
    by_loop = len({point.passes for point in points}) > 1  # else a first pass cannot be told from the others
    work = [
        [p.context, p.rows * by_row, by_loop, *(p.passes * rise.seconds(0, p.tokens / p.passes) for rise in unit_rises)]
        for p in points
    ]
    relative = numpy.array(work) / numpy.array([[point.seconds] for point in points])
    scale = numpy.maximum(relative.max(0), 1e-12)
    per_context, per_row, first, *rises = (nnls(relative / scale, numpy.ones(len(points)))[0] / scale).tolist()
    return CostTable.rising(zip(knots, numpy.cumsum(rises).tolist(), strict=True), per_context, per_row, first)


def _knots(tokens: Sequence[float]) -> list[float]:
    """Return numbers of tokens that lie apart, the least and the largest among them."""
    known = sorted(set(tokens))
    if len(known) < 2:
        raise ValueError(f"nothing to fit: {known} is one number of tokens, which shows no slope")
    found = [known[0]]
    for one in known[1:-1]:
        if one >= APART * found[-1] and APART * one <= known[-1]:
            found.append(one)
    return [*found, known[-1]]


def _error(cost: CostTable, points: Sequence[Timed]) -> float:
    """Median of |predicted / measured − 1|."""
    fitted = Fitted(cost, 0.0, ())
    return float(numpy.median([abs(fitted.predicted(point) / point.seconds - 1) for point in points]))


def _interval(stored: Any) -> tuple[float, float, float] | None:
    """Read an interval, a list in JSON."""
    if stored is None:
        return None
    median, low, high = stored
    return float(median), float(low), float(high)
