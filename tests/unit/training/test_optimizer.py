"""Groups of the optimizer: weight decay, and learning rates."""

from __future__ import annotations

import torch

from distillspec.config import DraftConfig, LossConfig, TrainConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.target_copy import TargetCopy
from distillspec.training.joint import JointModule
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable, make_optimizer

SETTINGS = TrainConfig(max_steps=1, weight_decay=0.1, target_rate=0.05)


def held(optimizer: torch.optim.Optimizer, rate: float) -> set[int]:
    """Addresses of the parameters with this share of the learning rate."""
    return {id(p) for group in optimizer.param_groups if group["rate"] == rate for p in group["params"]}


def test_matrices_decay_and_frozen_weights_are_left_out(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(keep=[0, 3]), target)
    choose_trainable(draft, train_embeddings=False)
    optimizer = make_optimizer(DistillModule(draft, LossConfig()), SETTINGS)
    decayed, rest = optimizer.param_groups
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.1, 0.0)
    assert all(p.ndim >= 2 for p in decayed["params"])
    assert all(p.ndim < 2 for p in rest["params"])
    assert held(optimizer, 1.0) == {id(p) for p in draft.model.parameters() if p.requires_grad}
    assert id(draft.model.get_input_embeddings().weight) not in held(optimizer, 1.0)


def test_a_target_that_trains_has_a_rate_of_its_own(target: LanguageModel) -> None:
    draft = initialise_draft(DraftConfig(kind="medusa"), target)
    choose_trainable(draft, train_embeddings=False)
    copy = TargetCopy(target, "new")
    optimizer = make_optimizer(JointModule(draft, copy.trained, LossConfig(), SETTINGS), SETTINGS)
    assert {group["rate"] for group in optimizer.param_groups} == {1.0, 0.05}
    assert held(optimizer, 0.05) == {id(p) for p in copy.trained.layers.parameters()}
    assert held(optimizer, 1.0) == {id(p) for p in draft.model.parameters() if p.requires_grad}
