"""Training of heads together with the target that they read (Medusa-2, Cai et al. 2024, section 2.2.2)."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from distillspec.config import LossConfig
from distillspec.losses import ChunkedLoss, DenseTeacher, LossMix, Teacher, TokenValues, chunked_loss
from distillspec.models import LanguageModel
from distillspec.models.features import pass_with_states
from distillspec.sampling import NonFiniteLogits
from distillspec.training.chains import Unrolling
from distillspec.training.module import DistillModule, teacher_view
from distillspec.types import TokenBatch

KEPT = LossMix.parse({"fkl": 1.0})  # holds the new target to the old one's distribution


class JointModule(DistillModule):
    """Heads on the states of a target that trains too.

    The heads learn the new target's distribution, since that is what verifies them. Their loss reaches the target
    through its states. `target_weight` · KL(old target ‖ new target) keeps it where it was. Without `target_learns` the
    heads learn alone.

    Args:
        target: its decoder's layers train.
    """

    def __init__(
        self,
        draft: LanguageModel,
        target: LanguageModel,
        config: LossConfig,
        target_weight: float,
        unrolling: Unrolling | None = None,
    ) -> None:
        super().__init__(draft, config, unrolling=unrolling)
        self.model = nn.ModuleDict({"draft": draft.model, "target": target.model})
        self.target, self.target_weight = target, target_weight
        self.target_learns = False

    @property
    def own_metrics(self) -> list[str]:
        return [*super().own_metrics, "target_kl"]

    def teacher(self, batch: TokenBatch, target: LanguageModel) -> Teacher:
        """Return the old target's distribution over the whole vocabulary, which the new one is held to."""
        return teacher_view(KEPT, batch, target)

    def forward(
        self,
        batch: TokenBatch,
        teacher: Teacher,
        weights: Tensor | None,
        normalizer: float,
        advantage: Tensor | None = None,
    ) -> ChunkedLoss | TokenValues | None:
        """Return the heads' loss and the target's, as `DistillModule.forward` does. `teacher` is the old target's."""
        with torch.set_grad_enabled(self.target_learns and torch.is_grad_enabled()):
            everywhere, states = pass_with_states(
                self.target, batch.input_ids, batch.position_ids, self.draft.state_ids
            )
        hidden = everywhere.flatten(0, 1)[batch.loss_index]
        new = DenseTeacher(hidden.detach(), self.target.head)
        heads = super().forward(replace(batch, states=states), new, weights, normalizer, advantage)
        if weights is None or not isinstance(heads, ChunkedLoss) or self.problem is not None:
            return heads
        kept = self._distance(hidden, teacher, weights, normalizer)
        metrics = {**heads.metrics, "target_kl": kept.metrics.get("loss", torch.tensor(math.nan))}
        return replace(heads, loss=heads.loss + self.target_weight * kept.loss, metrics=metrics)

    def _distance(self, hidden: Tensor, teacher: Teacher, weights: Tensor, normalizer: float) -> ChunkedLoss:
        """Return KL(old target ‖ new target), of states `hidden [N, D]` that the new target's head reads."""
        try:
            return chunked_loss(
                hidden,
                self.target.head,
                teacher,
                KEPT,
                weights=weights,
                normalizer=normalizer,
                chunk_tokens=self.config.chunk_tokens,
            )
        except NonFiniteLogits as error:
            self.problem = f"the target in training: {error}"
            return ChunkedLoss(hidden.sum() * math.nan, {})
