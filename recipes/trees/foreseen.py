"""The oracle: drafts that end exactly where verification will end them.

Greedy text, and text of seeded requests, is the same whatever is drafted. So one run over a prompt tells how many
drafted tokens are accepted at each position of its text, and a second run drafts that many there. No policy for how
long to draft is faster, as long as an accepted token costs less than a step. In bfloat16, passes of other shapes may
round to another text. Such a round has no oracle, and `judge` leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.shape import TreeShape


@dataclass
class AcceptedCounts:
    """Numbers of accepted tokens, by request and by tokens of its text when the step began."""

    counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def learn(self, result: StepResult) -> None:
        """Note how many tokens a step accepted in each row."""
        texts = {row.sequence_id: row.context_tokens for row in result.view.rows}
        for row in result.rows:
            if row.sequence_id in texts:
                self.counts[row.sequence_id, texts[row.sequence_id]] = row.accepted

    def of(self, sequence_id: str, tokens: int) -> int | None:
        """Return how many were accepted there. None: no step of the first run began there, as roundings differed."""
        return self.counts.get((sequence_id, tokens))


class Foreseen(LengthController):
    """Plans a shape's first levels, as many as will be accepted, and all of them where that is not known."""

    def __init__(self, shape: TreeShape, accepted: AcceptedCounts) -> None:
        self.shape = shape
        self.accepted = accepted
        self.speculation_length = shape.depth
        self.most_nodes = shape.nodes

    def plan(self, view: BatchView) -> Plan:
        rows = []
        for row in view.rows:
            levels = self.accepted.of(row.sequence_id, row.context_tokens)
            rows.append(RowPlan.of(row, self.shape if levels is None else self.shape.shortened(levels)))
        return Plan(tuple(rows))
