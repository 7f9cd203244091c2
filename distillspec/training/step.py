"""One optimizer step, as `distill train` and online adaptation take it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from distillspec.losses import Teacher
from distillspec.training.module import DistillModule
from distillspec.training.processes import agree, process_count, total, totals
from distillspec.training.step_advantages import batch_advantages
from distillspec.training.strategies import StepStrategy
from distillspec.training.token_weights import defined_at
from distillspec.types import TokenBatch

SUMMED = ("weight", "valid_weight", "loss", "alpha", "outside")  # of a loss's metrics


class WeightedBatch(NamedTuple):
    """A micro-batch on the device of the draft, with what the loss needs besides."""

    batch: TokenBatch
    teacher: Teacher
    weights: Tensor  # [N] float32, multiply each position's loss
    counted: Tensor  # [N] float32, their sum divides the loss: `weights`, or without a scale common to the batch


@dataclass(frozen=True)
class StepResult:
    """Figures of one step."""

    tokens: int  # response tokens of all processes
    sums: dict[str, float]  # over all processes, of the metrics in `SUMMED` and the module's own
    loss: float  # nats a token: what this process differentiated
    grad_norm: float  # before clipping
    problem: str = ""  # why the step was skipped, empty if it was taken

    @property
    def taken(self) -> bool:
        """True when the weights changed."""
        return not self.problem


class BadSteps:
    """Counter of the steps that were skipped because their loss or gradient was not finite."""

    def __init__(self, limit: int, total: int = 0) -> None:
        """`limit` skipped steps in a row are too many."""
        self.limit, self.total, self.in_a_row = limit, total, 0

    def count(self, result: StepResult) -> bool:
        """Add a step. Return True if there were too many in a row."""
        self.in_a_row = 0 if result.taken else self.in_a_row + 1
        self.total += not result.taken
        return self.in_a_row >= self.limit


def take_step(
    strategy: StepStrategy,
    module: DistillModule,
    batches: Sequence[WeightedBatch],
    *,
    learning_rate: float,
    clip_norm: float,
) -> StepResult:
    """Accumulate the gradients of `batches`, clip them to `clip_norm`, and update the weights.

    The weighted sum of the losses is divided by what `counted` sums to where the loss is defined, over all
    micro-batches and processes. Every process calls this with equally many batches. All skip the step when the gradient
    norm of any is not finite.
    """
    for group in strategy.optimizer.param_groups:
        group["lr"] = learning_rate * group.get("rate", 1.0)
    tokens = total(strategy.accelerator, sum(each.batch.response_tokens for each in batches))
    loss, sums = _accumulate(strategy, module, batches, max(_share_of_counted(strategy, module, batches), 1e-9))
    norm = strategy.clip(clip_norm)
    problem = "" if math.isfinite(norm) else module.problem or f"the gradient norm is {norm}"
    module.problem = None
    if agree(strategy.accelerator, bool(problem)):
        strategy.skip()
        problem = problem or "another process met numbers that are not finite"
    else:
        strategy.update()
    return StepResult(int(tokens), sums, loss, norm, problem)


def step_values(result: StepResult, learning_rate: float, tokens_per_s: float, bad_steps: int) -> dict[str, float]:
    """Return the finite figures of a step under the names (`train/…`) they are logged with."""
    values = {
        "train/grad_norm": result.grad_norm,
        "train/lr": learning_rate,
        "train/tokens_per_s": tokens_per_s,
        "train/bad_steps": float(bad_steps),
    }
    sums = result.sums
    if sums["weight"] > 0:
        shown = [name for name in sums if name not in ("weight", "valid_weight", "loss")]
        values.update({f"train/{name}": sums[name] / sums["weight"] for name in shown})
    if sums["valid_weight"] > 0:
        values["train/loss"] = sums["loss"] / sums["valid_weight"]
    return {name: value for name, value in values.items() if math.isfinite(value)}


def _share_of_counted(strategy: StepStrategy, module: DistillModule, batches: Sequence[WeightedBatch]) -> float:
    """Return the total over defined positions, divided by the processes: gradients are averaged over these."""
    counted = [
        float((each.counted * defined_at(module.mix, each.batch, module.kept_ids, module.draft.width)).sum())
        for each in batches
    ]
    return total(strategy.accelerator, sum(counted)) / process_count(strategy.accelerator)


def _accumulate(
    strategy: StepStrategy, module: DistillModule, batches: Sequence[WeightedBatch], normalizer: float
) -> tuple[float, dict[str, float]]:
    """Run forward and backward over the micro-batches. Return the loss and the metrics' sums over all processes."""
    sums, loss = dict.fromkeys([*SUMMED, *module.own_metrics], 0.0), 0.0
    advantages = batch_advantages(strategy, module, [b.batch for b in batches], [b.teacher for b in batches])
    for i, (batch, teacher, weights, _) in enumerate(batches):
        with strategy.micro_step(last=i == len(batches) - 1):
            result = strategy.module(batch, teacher, weights, normalizer, advantages[i])
            strategy.backward(result.loss)
        loss += float(result.loss.detach())
        for name in sums:
            sums[name] += float(result.metrics.get(name, math.nan))
    return loss, dict(zip(sums, totals(strategy.accelerator, list(sums.values())), strict=True))
