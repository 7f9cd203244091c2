"""Training of heads together with the target that they read (Medusa-2, Cai et al. 2024, section 2.2.2).

In place of the cross-entropy that keeps the target good there, the old target's distribution does (section 2.3.2).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import torch
from torch import Tensor, nn

from distillspec.config import LossConfig, TrainConfig
from distillspec.losses import ChunkedLoss, DenseTeacher, LossMix, Teacher, TokenValues, chunked_loss
from distillspec.models import LanguageModel
from distillspec.models.features import pass_with_states
from distillspec.training.module import DistillModule, teacher_view
from distillspec.training.unrolling import Unrolling
from distillspec.types import TokenBatch

KEPT = LossMix.parse({"fkl": 1.0})  # holds the new target to the old one's distribution


class JointModule(DistillModule):
    """Heads on the states of a target that trains too.

    The heads learn the new target's distribution, since that is what verifies them. Their loss reaches the target
    through its states. `train.target_weight` · KL(old target ‖ new target) keeps it where it was. In the first
    `train.target_warmup` of the run the heads learn alone.

    Args:
        target: the one to train, float32.
    """

    def __init__(self, draft: LanguageModel, target: LanguageModel, config: LossConfig, settings: TrainConfig) -> None:
        super().__init__(draft, config, unrolling=Unrolling.of(settings))
        self.model = nn.ModuleDict({"draft": draft.model, "target": target.model})
        self.target, self.settings = target, settings
        self.target_learns = False

    @property
    def own_metrics(self) -> list[str]:
        return [*super().own_metrics, "target_kl"]

    @property
    def parameter_groups(self) -> list[tuple[float, list[nn.Parameter]]]:
        theirs = list(self.target.model.parameters())
        known = set(map(id, theirs))
        return [(1.0, [p for p in self.parameters() if id(p) not in known]), (self.settings.target_rate, theirs)]

    def train(self, mode: bool = True) -> Self:
        """Set the heads' mode. The target stays in that of serving: dropout would blur what the heads learn from."""
        super().train(mode)
        self.target.model.eval()
        return self

    def begin_step(self, done: float) -> None:
        """Let the target learn once the heads' warm-up is over."""
        self.target_learns = done >= self.settings.target_warmup

    def teacher(self, batch: TokenBatch, target: LanguageModel) -> Teacher:
        """Return the old target's distribution, recorded or computed, which the new one is held to."""
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
        target_loss = chunked_loss(
            hidden,
            self.target.head,
            teacher,
            KEPT,
            weights=weights,
            normalizer=normalizer,
            chunk_tokens=self.config.chunk_tokens,
        )
        metrics = {**heads.metrics, "target_kl": target_loss.metrics["loss"]}
        return replace(heads, loss=heads.loss + self.settings.target_weight * target_loss.loss, metrics=metrics)
