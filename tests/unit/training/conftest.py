"""A whole training run in a second: the tiny target, a two-layer draft, twelve samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState

from distillspec.config import DraftConfig, LossConfig, TrackerConfig, TrainCommand, TrainConfig
from distillspec.generation import SlotGenerator
from distillspec.models import LanguageModel, initialise_draft
from distillspec.signals import SignalRequest
from distillspec.training.feed import SampleFeed
from distillspec.training.joint import JointModule
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable, make_optimizer
from distillspec.training.strategies import ReplicatedStrategy
from distillspec.training.tracking import Tracker
from distillspec.training.trainer import RunHooks, RunModels, Trainer
from distillspec.types import GenerationRequest, Prompt, Sample, SamplingPolicy

PROBE = torch.tensor([[1, 20, 30, 40, 50, 60, 70, 80]])
SETTINGS: dict[str, Any] = {"max_steps": 6, "batch_tokens": 64, "row_tokens": 32, "eval_every": 3, "dtype": "float32"}

HOOKS = [field.name for field in fields(RunHooks)]
MakeTrainer = Callable[..., Trainer]


@pytest.fixture(scope="session")
def samples(target: LanguageModel) -> list[Sample]:
    """Twelve answers of the target with its ten best tokens at each position."""
    requests = [GenerationRequest(Prompt(f"p{i}", (1, 20 + i, 30 + 2 * i)), 12, seed=i) for i in range(12)]
    stream = SlotGenerator(target).generate(
        requests, SamplingPolicy(), stop_ids=target.stop_ids, signal=SignalRequest("topk", 10)
    )
    return [sample for _, sample in sorted(stream, key=lambda item: item[0])]


@torch.no_grad()
def overlap(draft: LanguageModel, target: LanguageModel) -> float:
    """Σ min(p, q) on a fixed sequence."""
    theirs = torch.softmax(target.logits(PROBE), -1)
    return float(torch.minimum(torch.softmax(draft.full_width(draft.logits(PROBE)), -1), theirs).sum(-1).mean())


@pytest.fixture
def make_trainer(target: LanguageModel, samples: list[Sample], tmp_path: Path) -> MakeTrainer:
    """`make_trainer(folder=..., draft=..., loss=..., train=..., **more)`, the same one each time.

    `more` are fields of `RunModels` and `RunHooks`, and the trainer's own arguments. With a `target_copy` both train.
    """

    def make(
        folder: Path = tmp_path / "run",
        *,
        draft: LanguageModel | None = None,
        loss: LossConfig | None = None,
        train: dict[str, Any] | None = None,
        samples_: list[Sample] | None = None,
        **extra: Any,
    ) -> Trainer:
        AcceleratorState._reset_state()
        PartialState._reset_state()
        torch.manual_seed(0)
        folder.mkdir(parents=True, exist_ok=True)
        draft = draft or initialise_draft(DraftConfig(keep=[0, 3]), target)
        config = TrainCommand(
            train=TrainConfig(**{**SETTINGS, **(train or {})}),
            loss=loss or LossConfig(),
            tracker=TrackerConfig(kind="none"),
        )
        choose_trainable(draft, train_embeddings=False)
        accelerator = Accelerator(cpu=True, mixed_precision="no")
        models = RunModels(draft, target, extra.pop("reference", None), extra.pop("target_copy", None))
        module = (
            DistillModule(draft, config.loss)
            if models.target_copy is None
            else JointModule(draft, models.target_copy.trained, config.loss, config.train)
        )
        strategy = ReplicatedStrategy(accelerator, module, lambda m: make_optimizer(m, config.train))
        feed = SampleFeed(samples if samples_ is None else samples_, config.train, 2, config.seed)
        extra.setdefault("evaluate", lambda model: {"eval/alpha": overlap(model, target)})
        hooks = RunHooks(**{name: extra.pop(name) for name in HOOKS if name in extra})
        tracker = Tracker(accelerator, config.tracker, folder)
        return Trainer(models, module, strategy, feed, config, folder, tracker, hooks, **extra)

    return make
