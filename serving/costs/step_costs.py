"""Seconds of a planned step: the target's pass, drafting, and the reading of texts by drafts that are behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy

from distillspec.serving.base.rows import Option, RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.costs.chain_batch import LEAST_STEP_S
from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.serving.costs.latency import LatencyModel

PAY_BACK_STEPS = 24  # steps in which the reading of a long text by a draft must pay


@dataclass(frozen=True)
class StepCosts:
    """Costs of what rows draft in one step.

    Prompt tokens read in the same step cost the same whatever is drafted, so their time is not in it. They are only
    counted as tokens of the target's pass, where they may make each further token dearer.

    latency: costs of passes.
    rows: of the step.
    prefill_tokens: prompt tokens in the target's pass.
    """

    latency: LatencyModel
    rows: int
    prefill_tokens: int = 0

    def nodes_s(self, nodes: int, before: int = 0) -> float:
        """Return the seconds that so many nodes add to the target's pass, behind `before` others."""
        table = self.latency.target
        others = self.rows + self.prefill_tokens + before
        return table.seconds(0, others + nodes) - table.seconds(0, others) if nodes else 0.0

    def step_s(self, trees: Sequence[tuple[RowView, TreeShape]], nodes: int) -> float:
        """Return the seconds of a step.

        Args:
            trees: of each row, its source alone and the tree that this drafts.
            nodes: all drafted tokens, those that drafts' trees are behind included.
        """
        rows = len(trees)
        context = sum([row.context_tokens for row, _ in trees])
        seconds = self.latency.target.seconds(context, rows, rows) + self.nodes_s(nodes) + self._drafting_s(trees)
        return max(seconds, LEAST_STEP_S)

    def _drafting_s(self, trees: Sequence[tuple[RowView, TreeShape]]) -> float:
        """Return the seconds of all drafting. All sources without a model together cost `draft_free_s`."""
        free = False
        work: dict[tuple[str, bool], list[tuple[int, tuple[int, ...]]]] = {}  # by source and `drafts_block`
        for row, shape in trees:
            drafts = row.drafted_by_model and shape.depth > 0
            free = free or row.likely is not None or (shape.depth > 0 and not drafts)
            if drafts:
                work.setdefault((row.source, row.drafts_block), []).append((row.context_tokens, shape.reads))
        passes_s = [
            self.latency.of_draft(source, drafts_block=block).trees_s(rows) for (source, block), rows in work.items()
        ]
        return sum(passes_s, self.latency.draft_free_s * free)

    def of_trees(self, rows: Sequence[RowView], option: Option, levels: int, nodes: int, further: int) -> DraftedCosts:
        """Return the costs of trees that one source drafts for some rows, as if all others without a model did so too.

        Args:
            levels, nodes: the most that a tree may have.
            further: nodes of others in the target's pass.
        """
        latency = self.latency.of_draft(option.source, drafts_block=option.drafts_block)
        if not option.drafted_by_model:
            latency = replace(latency, draft=None, draft_free_s=latency.draft_free_s * len(rows) / max(1, self.rows))
        contexts = numpy.array([row.context_tokens for row in rows])
        beside = self.rows + self.prefill_tokens - len(rows) + further
        return DraftedCosts(latency, contexts, levels, beside, nodes=nodes)

    def reading_s(self, option: RowView | Option) -> float:
        """Return the seconds in which a draft reads a text that it is far behind in."""
        return self.latency.reading_s(option.unread_tokens, option.source) if option.drafted_by_model else 0.0

    def paid_back_s(self, option: RowView | Option, steps_left: float) -> float:
        """Return what this reading costs a step, where it must pay in the steps that are left."""
        return self.reading_s(option) / min(PAY_BACK_STEPS, steps_left)
