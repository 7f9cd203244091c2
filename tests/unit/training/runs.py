"""Helpers of the trainer's tests: logged lines, weights, gradients, and a stop at a step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from distillspec.training.interrupts import StopRequest
from distillspec.training.schedule import Progress
from distillspec.training.step import StepResult, take_step
from distillspec.training.trainer import Trainer
from distillspec.types import TokenBatch

TIMINGS = {"seconds", "train/tokens_per_s"}


def metrics(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k not in TIMINGS} for line in metrics(folder)]


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return trainer.draft.model.state_dict()


def assert_equal_weights(ours: Trainer, theirs: Trainer) -> None:
    assert all(torch.equal(value, weights(theirs)[name]) for name, value in weights(ours).items())


def stop_at(step: int) -> dict[str, Any]:
    """Trainer arguments that ask it to stop once `step` steps are done."""
    stop = StopRequest()

    def watch(progress: Progress, values: dict[str, float]) -> None:
        if progress.step == step:
            stop.signal_number = 15

    return {"stop": stop, "report": watch}


def gradients(trainer: Trainer, batches: Sequence[TokenBatch]) -> tuple[StepResult, list[torch.Tensor]]:
    """Take a step without clipping or updating. Return its figures and the gradients."""
    weighted = [trainer.weighted(batch) for batch in batches]
    with mock.patch.object(trainer.strategy, "update"):
        result = take_step(trainer.strategy, trainer.module, weighted, learning_rate=1e-3, clip_norm=1e9)
    found = [p.grad.clone() for p in trainer.module.parameters() if p.grad is not None]
    trainer.strategy.optimizer.zero_grad()
    return result, found
