"""The oracle: drafts that end exactly where verification will end them.

Greedy text, and text of seeded requests, is the same whatever is drafted. So one run over a prompt tells how many
drafted tokens stand at each place of its text, and a second run drafts so many there. No policy for how long to
draft is faster, as long as a drafted token that stands costs less than a step. In bfloat16 passes of other shapes may
round to another text: such a round is no oracle's, and is told apart (`judge`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.plans import Plan, RowPlan, StepResult
from distillspec.serving.base.rows import BatchView
from distillspec.serving.base.shape import TreeShape


@dataclass
class Standing:
    """Numbers of drafted tokens that stood, by request and by tokens of its text."""

    found: dict[tuple[str, int], int] = field(default_factory=dict)

    def learn(self, result: StepResult) -> None:
        """Note what a step showed."""
        texts = {row.sequence_id: row.context_tokens for row in result.view.rows}
        for row in result.rows:
            if row.sequence_id in texts:
                self.found[row.sequence_id, texts[row.sequence_id]] = row.accepted

    def of(self, sequence_id: str, tokens: int) -> int | None:
        """Return how many stand there. None: a step of the first run did not begin there, as roundings differed."""
        return self.found.get((sequence_id, tokens))


class Foreseen(LengthController):
    """Plans a shape's first levels, as many as will be accepted, and all of them where that is not known."""

    def __init__(self, shape: TreeShape, standing: Standing) -> None:
        self.shape, self.standing = shape, standing
        self.speculation_length, self.most_nodes = shape.depth, shape.nodes

    def plan(self, view: BatchView) -> Plan:
        rows = []
        for row in view.rows:
            levels = self.standing.of(row.sequence_id, row.context_tokens)
            rows.append(RowPlan.of(row, self.shape if levels is None else self.shape.shortened(levels)))
        return Plan(tuple(rows))
