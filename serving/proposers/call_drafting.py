"""Drafting all trees of a step on CPUs, in one call of C++ (`DraftSteps`). Shapes and depths of rows may differ."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.models.draft_steps import DraftSteps, DrawParameters
from distillspec.models.native_layers import MOST_NODES
from distillspec.serving.decoding.drafting import COLDEST, noise_keys
from distillspec.serving.decoding.logits import Place, needs_transform
from distillspec.serving.decoding.sampling import TokenSampler
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.growth import Growth, TreePolicy
from distillspec.serving.proposers.tree_readers import CallPlan, call_plan


class CallDrafting:
    """Grows the trees of many rows in one call, where the kernel is made for the draft and the rows."""

    def __init__(self, runner: ModelRunner, sampler: TokenSampler) -> None:
        self.runner, self.sampler = runner, sampler

    def may_take(self, row: Growth) -> bool:
        """Return False for a row that needs another way of drafting: others need not go that way with it."""
        return self._steps is not None and self._is_plain(row)

    def takes(self, rows: Sequence[Growth], texts: Sequence[RowInput]) -> bool:
        """Return False where rows that it `may_take` need another way of drafting together."""
        steps = self._steps
        if steps is None or not self.runner.hands_states:
            return False
        masks = self.runner.masks(max(row.shape.depth for row in rows))
        if not steps.native.takes_chains(self.runner.cache, [len(text.tokens) + masks for text in texts]):
            return False
        if any(sum(row.shape.reads) > MOST_NODES for row in rows):  # what a reader sees is a word of bits
            return False
        plan = call_plan(tuple([row.shape for row in rows]))
        return steps.native.takes_level(plan.level)

    def draft(
        self, rows: Sequence[Growth], texts: Sequence[RowInput], trees: TreePolicy
    ) -> tuple[Tensor | None, list[Growth]]:
        """Grow all trees. For arguments and result see `LevelDrafting.draft`."""
        steps, shapes = self._steps, tuple([row.shape for row in rows])
        assert steps is not None
        plan = call_plan(shapes)
        unread = self.runner.unread(texts, plan.depth)
        parameters = self._draw_parameters(rows, plan, trees)
        chosen = steps.run(self.runner.cache, unread, plan.readers, parameters)
        self.runner.passes += 1 if self.runner.drafts_block else plan.depth
        ids, finite, failed = chosen.ids.tolist(), chosen.finite.tolist(), list[Growth]()
        for row, start, readers in zip(rows, plan.starts, plan.places, strict=True):
            if not row.fill(ids[start : start + row.shape.nodes], [finite[reader] for reader in readers], readers):
                failed.append(row)
        return chosen.probs, failed

    @property
    def _steps(self) -> DraftSteps | None:
        prepared = self.runner.prepared
        return None if prepared is None else prepared.steps

    @staticmethod
    def _is_plain(row: Growth) -> bool:
        """Return True for tokens that logits, policy and seed decide."""
        given = row.guess or row.sequence.candidates or needs_transform(row.sequence)
        return row.shape.depth > 0 and not given

    def _draw_parameters(self, rows: Sequence[Growth], plan: CallPlan, trees: TreePolicy) -> DrawParameters | None:
        params = [row.sequence.params for row in rows]
        greedy = [each.is_greedy or (trees.most_probable and each.seed is None) for each in params]
        if all(greedy):
            return None
        policies = [
            (0.0 if takes_best else max(each.temperature, COLDEST), each.top_k, each.top_p, each.min_p)
            for each, takes_best in zip(params, greedy, strict=True)
        ]
        parameters = DrawParameters(
            torch.tensor(policies, dtype=torch.float64), self.sampler.proposal_uniforms(len(rows), *plan.draws)
        )
        seeded = [each.seed is not None for each in params]
        if not any(seeded):
            return parameters
        keys = noise_keys([Place(row.sequence) for row in rows], plan.depth)
        return parameters._replace(keys=keys, seeded=torch.tensor(seeded))
