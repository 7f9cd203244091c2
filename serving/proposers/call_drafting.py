"""Drafting all trees of a step on CPUs, in one call of C++ (`DraftSteps`). Shapes and depths of rows may differ."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distillspec.models.draft_steps import Chance, DraftSteps
from distillspec.models.few_tokens import MOST_NODES
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.decoding.drafting import Draws
from distillspec.serving.decoding.logits import Columns, Place, needs_transform
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.flat_batch import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.growth import Growth
from distillspec.serving.proposers.tree_readers import call_plan, most_readers


class CallDrafting:
    """Grows the trees of many rows in one call, where the kernel is made for the draft and the rows.

    Args:
        topk: choose the most probable tokens where others would be drawn.
    """

    def __init__(self, runner: ModelRunner, sampler: TokenSampler, columns: Columns, *, topk: bool) -> None:
        self.runner, self.sampler, self.columns, self.topk = runner, sampler, columns, topk

    def takes(self, rows: Sequence[Growth], texts: Sequence[RowInput]) -> bool:
        """Return False where other ways of drafting are needed."""
        steps = self._steps
        if steps is None or not self.runner.hands_states or not all(map(self._is_plain, rows)):
            return False
        counts = [len(text.tokens) for text in texts]
        return steps.few.takes_chains(self.runner.cache, counts) and most_readers([r.shape for r in rows]) <= MOST_NODES

    def draft(self, rows: Sequence[Growth], texts: Sequence[RowInput]) -> tuple[Tensor | None, list[Growth]]:
        """Grow all trees. For arguments and result see `LevelDrafting.draft`."""
        steps, shapes = self._steps, tuple([row.shape for row in rows])
        assert steps is not None
        plan = call_plan(shapes)
        places = [Place(row.sequence) for row in rows]
        siblings = max(max(shape.widths) for shape in shapes)
        draws = self.sampler.draws(places, most_readers(shapes), self.columns, siblings, best=self.topk)
        found = steps.run(self.runner.cache, self.runner.unread(texts), plan.readers, _chance(draws))
        self.runner.passes += len(plan.readers.levels) - 1
        ids, finite, failed = found.ids.tolist(), found.finite.tolist(), list[Growth]()
        for row, start, own in zip(rows, plan.starts, plan.places, strict=True):
            if not row.fill(ids[start : start + row.shape.nodes], [finite[place] for place in own], own):
                failed.append(row)
        return found.probs, failed

    @property
    def _steps(self) -> DraftSteps | None:
        prepared = self.runner.prepared
        return None if prepared is None or self.runner.one_pass else prepared.steps

    def _is_plain(self, row: Growth) -> bool:
        """Return True for tokens that logits and a temperature decide."""
        if row.guess or row.sequence.candidates or needs_transform(row.sequence):
            return False
        return row.shape.depth > 0 and self._has_policy(row.sequence)

    def _has_policy(self, sequence: SequenceState) -> bool:
        params = sequence.params
        if params.is_greedy or (self.topk and params.seed is None):
            return True
        return params.seed is None and params.top_k == 0 and params.top_p == 1 and params.min_p == 0


def _chance(draws: Draws) -> Chance | None:
    if draws.temperatures is None or draws.uniforms is None:
        return None
    return Chance(draws.temperatures, draws.greedy, draws.uniforms)
