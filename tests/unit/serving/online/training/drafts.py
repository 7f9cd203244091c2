"""Drafts that learn: fresh copies, their acceptance, and an update of one."""

from __future__ import annotations

import copy
from dataclasses import replace

import torch

from distillspec.config import AdaptConfig, LossConfig
from distillspec.models import LanguageModel
from distillspec.serving.online.training.examples import training_example_of
from distillspec.serving.online.training.learning import UpdateResult, learn

CONFIG = AdaptConfig(max_steps=30, epochs=30, learning_rate=2e-3, batch_tokens=256, row_tokens=256)


def fresh(draft: LanguageModel) -> LanguageModel:
    return replace(draft, model=copy.deepcopy(draft.model))


def alpha(draft: LanguageModel, target: LanguageModel, ids: torch.Tensor) -> float:
    with torch.no_grad():
        p, q = (torch.softmax(m.logits(ids).float(), -1) for m in (target, draft))
    return float(torch.minimum(p, q).sum(-1).mean())


def updated(draft: LanguageModel, answers: list, config: AdaptConfig = CONFIG, **extra: object) -> UpdateResult:
    return learn(draft, [training_example_of(a, config) for a in answers], config, LossConfig(), **extra)[0]  # type: ignore[arg-type]
