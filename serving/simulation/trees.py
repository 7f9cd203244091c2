"""Full trees of several heads' candidates, as Medusa's: nodes, acceptance, and the tree of highest goodput."""

from __future__ import annotations

from itertools import product

import numpy
from numpy.typing import NDArray

from distillspec.errors import ConfigError
from distillspec.serving.base.fixed import alike
from distillspec.serving.base.plans import Plan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.costs.latency import LatencyModel

PRIOR, PRIOR_TRIALS = 0.4, 4.0  # acceptance of a head's first candidate, and its weight in trials
FORGETTING = 0.999  # weight of a step's trials after the next step


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
        widths = [own for depth in range(heads + 1) for own in product(range(1, most + 1), repeat=depth)]
        self.shapes = list(map(TreeShape.full, widths))
        self._nodes = numpy.array([shape.nodes for shape in self.shapes])
        self.speculation_length, self.most_nodes = heads, int(self._nodes.max())
        padded = [[*own, *[0] * (heads - len(own))] for own in widths]
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
            return alike(view, TreeShape())
        below = numpy.concatenate([numpy.zeros((len(self._tried), 1)), numpy.cumsum(self.acceptance, 1)], 1)
        success = below[numpy.arange(len(below)), self._widths]  # [shapes, heads]
        tokens = rows * (1 + numpy.cumprod(success, 1).sum(1))
        context = sum([row.context_tokens for row in view.rows])
        # Without prompt tokens, as in GoodputController: they cost the same whatever is drafted.
        seconds = numpy.array([self.latency.target.seconds(context, int(count)) for count in rows * (1 + self._nodes)])
        seconds = seconds + numpy.where(self._nodes > 0, self.latency.draft_free_s, 0.0)
        best = int(numpy.argmax(tokens / seconds))
        nodes = [int(self._nodes[best])] * rows
        step_s = self.latency.step_s([row.context_tokens for row in view.rows], nodes, view.prefill_tokens)
        return alike(view, self.shapes[best], float(tokens[best]), step_s)

    def observe(self, result: StepResult) -> None:
        """Count at each rank what was tried and accepted."""
        self._accepted *= FORGETTING
        self._tried *= FORGETTING
        for row in result.rows:
            for trial in row.trials:
                self._tried[trial.depth - 1, trial.rank] += 1
                self._accepted[trial.depth - 1, trial.rank] += trial.accepted

    def draft_changed(self, acceptance: float | None = None) -> None:
        """Return to the prior: candidates are independent tries."""
        self._tried[:] = PRIOR_TRIALS
        self._accepted[:] = PRIOR_TRIALS * PRIOR
