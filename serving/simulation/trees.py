"""Full trees of several heads' candidates, as Medusa's: nodes, acceptance, and the tree of highest goodput."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy
from numpy.typing import NDArray

from distillspec.errors import ConfigError
from distillspec.serving.control.base import BatchView, Plan, RowPlan, StepResult
from distillspec.serving.costs.latency import LatencyModel

PRIOR, PRIOR_TRIALS = 0.4, 4.0  # acceptance of a head's first candidate, and its weight in trials
FORGETTING = 0.999  # weight of a step's trials after the next step


@dataclass(frozen=True)
class TreePlan(Plan):
    """The same tree for all rows: `widths[i]` candidates of head i under every node of its level."""

    widths: tuple[int, ...] = ()


def tree_nodes(widths: Sequence[int]) -> int:
    """Return the tokens that verification reads, root included: 1 + Σ_h Π_{i ≤ h} k_i.

    (3, 2, 2) has 1 + 3 + 6 + 12 = 22.
    """
    nodes, level = 1, 1
    for width in widths:
        level *= width
        nodes += level
    return nodes


class FixedTree:
    """The same widths for every row and step."""

    def __init__(self, widths: Sequence[int]) -> None:
        if any(width < 1 for width in widths):
            raise ConfigError(f"widths={tuple(widths)} must be at least 1 each")
        self.widths = tuple(widths)
        self.longest = tree_nodes(widths) - 1

    def plan(self, view: BatchView) -> Plan:
        return _tree_plan(view, self.widths)

    def trim(self, view: BatchView, plan: Plan) -> tuple[int, ...]:
        return tuple(row.length for row in plan.rows)

    def observe(self, result: StepResult) -> None:
        """Learn nothing."""

    def draft_changed(self) -> None:
        """Forget nothing."""


class GoodputTree:
    """Chooses before each step the widths of highest goodput, from each head's measured ranks.

    Args:
        heads: the most levels.
        most: the most candidates a head.
        latency: costs of steps.
    """

    def __init__(self, heads: int, most: int, latency: LatencyModel) -> None:
        if heads < 1 or most < 1:
            raise ConfigError(f"heads={heads} and most={most} must be at least 1")
        self.latency, self.most = latency, most
        self.shapes = [shape for depth in range(heads + 1) for shape in product(range(1, most + 1), repeat=depth)]
        self.longest = max(map(tree_nodes, self.shapes)) - 1
        self._nodes = numpy.array([tree_nodes(shape) for shape in self.shapes])
        padded = [[*shape, *[0] * (heads - len(shape))] for shape in self.shapes]
        self._widths = numpy.array(padded).reshape(-1, heads)
        self._tried = numpy.zeros((heads, most))
        self._accepted = numpy.zeros((heads, most))
        self.draft_changed()

    @property
    def acceptance(self) -> NDArray[numpy.float64]:
        """P(candidate r of head i is right), `[heads, most]`."""
        alone = self._accepted / self._tried  # where those before it were rejected
        before = numpy.cumprod(numpy.concatenate([numpy.ones((len(alone), 1)), 1 - alone[:, :-1]], 1), 1)
        found: NDArray[numpy.float64] = alone * before
        return found

    def plan(self, view: BatchView) -> Plan:
        rows = len(view.rows)
        if rows == 0:
            return _tree_plan(view, ())
        below = numpy.concatenate([numpy.zeros((len(self._tried), 1)), numpy.cumsum(self.acceptance, 1)], 1)
        success = below[numpy.arange(len(below)), self._widths]  # [shapes, heads]
        tokens = rows * (1 + numpy.cumprod(success, 1).sum(1))
        context = sum([row.context_tokens for row in view.rows])
        # Without prompt tokens, as in GoodputController: they cost the same whatever is drafted.
        seconds = numpy.array([self.latency.target.seconds(context, int(count)) for count in rows * self._nodes])
        seconds = seconds + numpy.where(self._nodes > 1, self.latency.draft_free_s, 0.0)
        best = int(numpy.argmax(tokens / seconds))
        lengths = [int(self._nodes[best]) - 1] * rows
        step_s = self.latency.step_s([row.context_tokens for row in view.rows], lengths, view.prefill_tokens)
        return _tree_plan(view, self.shapes[best], float(tokens[best]), step_s)

    def trim(self, view: BatchView, plan: Plan) -> tuple[int, ...]:
        return tuple(row.length for row in plan.rows)

    def observe(self, result: StepResult) -> None:
        """Count at each rank what was tried and accepted."""
        self._accepted *= FORGETTING
        self._tried *= FORGETTING
        for row in result.rows:
            for trial in row.trials:
                self._tried[trial.depth - 1, trial.rank] += 1
                self._accepted[trial.depth - 1, trial.rank] += trial.accepted

    def draft_changed(self) -> None:
        """Return to the prior: candidates are independent tries."""
        self._tried[:] = PRIOR_TRIALS
        self._accepted[:] = PRIOR_TRIALS * PRIOR


def _tree_plan(
    view: BatchView, widths: tuple[int, ...], tokens: float | None = None, seconds: float | None = None
) -> TreePlan:
    nodes = tree_nodes(widths) - 1
    rows = tuple([RowPlan(row.sequence_id, nodes if row.limit else 0) for row in view.rows])
    return TreePlan(rows, tokens, seconds, None, widths)
