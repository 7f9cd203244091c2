"""Plan of a step, and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distillspec.serving.base.acceptance import RowResult
from distillspec.serving.base.rows import BatchView, RowView, is_joined
from distillspec.serving.base.shape import PlannedTree, TreeShape, chain_of


class RowPlan(NamedTuple):
    """Trees to draft for one row, one of each source, joined at the root. Without any it decodes plainly.

    draft_prefill: False: a draft model that has not read this row's text never will. Draft-free proposers may still
        serve the row.
    verified: the most levels to verify, None for all that are drafted. It is planned, and so no function of the drafted
        tokens: to drop one because of its value, or because a chain ended at it, would change the distribution.
    """

    sequence_id: str
    trees: tuple[PlannedTree, ...] = ()
    draft_prefill: bool = True
    verified: int | None = None

    @classmethod
    def chain(
        cls, row: RowView, speculation_length: int, draft_prefill: bool = True, verified: int | None = None
    ) -> RowPlan:
        """Return the plan of a chain from the row's own source, at most as long as the row's limit."""
        return cls(row.sequence_id, chain_of(min(speculation_length, row.limit), row.source), draft_prefill, verified)

    @classmethod
    def of(cls, row: RowView, shape: TreeShape) -> RowPlan:
        """Return the plan of a tree from the row's own source, of at most as many levels as the row's limit.

        A draft's tree is behind the row's likely nodes, if it has them.
        """
        trees = [PlannedTree(row.source, shape.shortened(row.limit))]
        if is_joined(row) and row.likely is not None:
            trees.insert(0, PlannedTree(row.likely.source, row.likely.shape))
        return cls(row.sequence_id, tuple([tree for tree in trees if tree.shape.depth]))

    @classmethod
    def joined(cls, row: RowView, shape: TreeShape) -> RowPlan:
        """Return the plan of a tree from each of the row's sources, of at most as many levels as each may have."""
        trees = [PlannedTree(option.source, shape.shortened(option.limit)) for option in row.options]
        return cls(row.sequence_id, tuple([tree for tree in trees if tree.shape.depth]))

    @property
    def speculation_length(self) -> int:
        """Levels of the deepest tree. 0 is plain decoding."""
        return max([tree.shape.depth for tree in self.trees], default=0)

    @property
    def verified_length(self) -> int:
        """The most levels that are verified."""
        return self.speculation_length if self.verified is None else min(self.speculation_length, self.verified)


class Reading(NamedTuple):
    """Text that a draft reads ahead of a switch to it."""

    sequence_id: str
    source: str
    tokens: int  # at most


@dataclass(frozen=True)
class Plan:
    """Plans of all rows of the view, in its order. Predictions are there if the controller makes any."""

    rows: tuple[RowPlan, ...]
    predicted_tokens: float | None = None
    predicted_s: float | None = None
    why: Any = None  # the controller's reasons
    chosen: Mapping[str, str | None] | None = None  # of several drafts, the one chosen for each row
    readings: tuple[Reading, ...] = ()
    seen: BatchView | None = None  # that lengths were planned for, if not the step's: each row with its chosen draft


@dataclass(frozen=True)
class StepResult:
    """Result of a step, for controllers, metrics and logs. Times are seconds."""

    rows: tuple[RowResult, ...]
    view: BatchView
    plan: Plan
    prefill_tokens: int
    draft_s: float
    target_s: float
    total_s: float
    reserved_tokens: int = 0  # reserved in the cache when the step started
    drafted_s: Mapping[str, float] = field(default_factory=dict)  # of each of several sources, parts of draft_s
    readings_s: float = 0.0  # of drafts that read ahead of a switch (a part of draft_s), and of the target (of none)
    planning_s: float = 0.0  # of foreseeing proposals and choosing among them
    overlapped_s: float = 0.0  # of the host, while a device ran the target's pass: a part of target_s


def decoding_rows(result: StepResult) -> Sequence[RowResult]:
    """Return the results of rows that were decoding already. The others got a first token from their prompts."""
    if not result.prefill_tokens:
        return result.rows
    decoding = {row.sequence_id for row in result.view.rows}
    return [row for row in result.rows if row.sequence_id in decoding]
