"""Trainable parameters, and the optimizer over them."""

from __future__ import annotations

from torch.optim import AdamW, Optimizer

from distillspec.config import TrainConfig
from distillspec.models import LanguageModel
from distillspec.models.own_weights import own_embeddings
from distillspec.training.module import DistillModule


def choose_trainable(draft: LanguageModel, train_embeddings: bool) -> None:
    """Make all weights trainable but the input embeddings, which the target has learnt already (unless requested).

    Embeddings that are the head too (tied weights) train: a frozen head would hold the draft back.
    """
    if train_embeddings and draft.state_input is not None:
        own_embeddings(draft.model)  # training would change the target's
    draft.model.requires_grad_(True)
    embeddings = draft.model.get_input_embeddings().weight
    tied = draft.model.get_output_embeddings().weight is embeddings
    if not (train_embeddings or tied or draft.lineage.get("kind") == "scratch"):
        embeddings.requires_grad_(False)


def make_optimizer(module: DistillModule, config: TrainConfig) -> Optimizer:
    """Return AdamW with weight decay for matrices and none for norms and biases.

    `rate` of a group multiplies its learning rate.
    """
    groups = []
    for rate, parameters in module.parameter_groups:
        trainable = [p for p in parameters if p.requires_grad]
        matrices, rest = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
        groups.append({"params": matrices, "weight_decay": config.weight_decay, "rate": rate})
        groups.append({"params": rest, "weight_decay": 0.0, "rate": rate})
    first, second = config.betas
    return AdamW([g for g in groups if g["params"]], lr=config.learning_rate, betas=(first, second), fused=True)
