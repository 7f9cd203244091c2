"""One update of the draft: a few optimizer steps on logged answers."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch

from distillspec.config import AdaptConfig, LossConfig, TrainConfig
from distillspec.errors import RunError
from distillspec.losses import SignalTeacher
from distillspec.models import LanguageModel
from distillspec.serving.online.training.examples import ExampleBatch, TrainingExample, example_batches
from distillspec.serving.online.training.memory import Memory
from distillspec.signals import TeacherSignal
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable, make_optimizer
from distillspec.training.state_store import StateStore
from distillspec.training.step import BadSteps, StepResult, WeightedBatch, take_step
from distillspec.training.strategies import SingleProcessStrategy
from distillspec.training.unrolling import Unrolling

WARM_UP = 10  # steps of a lineage, over which the learning rate rises: Adam's first steps are the least informed


@dataclass(frozen=True)
class UpdateResult:
    """Figures of an update, and the reason if it gave no draft to use."""

    steps: int  # taken
    tokens: int  # response tokens with a weight, repeats counted
    bad_steps: int  # skipped: loss or gradient was not finite
    loss: float  # nats a token, mean over the first tenth of the steps
    loss_at_end: float  # over the last tenth
    seconds: float
    cpu_s: float
    problem: str = ""  # why there is no new version, empty if there is one
    # Acceptance on the update's text, first and last tenth. Without draws from the tail it is an upper bound.
    alpha: float = math.nan
    alpha_at_end: float = math.nan
    new_ids: int = 0  # that came into a truncated vocabulary
    ceiling: dict[str, float] = field(default_factory=dict)  # upper bound of acceptance on the text, by its domain

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass
class _Figures:
    """Figures of the steps taken so far."""

    losses: list[float] = field(default_factory=list)
    alphas: list[float] = field(default_factory=list)
    tokens: int = 0

    def add(self, result: StepResult, batch: ExampleBatch) -> None:
        self.losses.append(result.loss)
        self.alphas.append(result.sums["alpha"] / result.sums["weight"])
        self.tokens += int((batch.weights > 0).sum())


def learn(
    draft: LanguageModel,
    examples: Sequence[TrainingExample],
    config: AdaptConfig,
    loss: LossConfig,
    *,
    memory: Memory | None = None,
    states: StateStore | None = None,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> tuple[UpdateResult, Memory | None]:
    """Train `draft` (float32 weights) in place. Return figures, and the memory for the next update.

    A step whose loss or gradient is not finite is skipped. `max_bad_steps` of them in a row end the update with a
    problem. The weights must not be used then.

    Args:
        memory: of the update that made `draft`. None: the optimizer begins anew.
        states: the target's states, for a draft that reads some.
        on_step: called before each step with its number, from 0.

    Raises:
        RunError: no token of `examples` has a weight.
    """
    if not any(bool((example.weights > 0).any()) for example in examples):
        raise RunError("no logged token has a weight; use adapt.positions=all, or wait for more requests")
    started, cpu = time.monotonic(), time.process_time()
    figures, student = _Figures(), _Student(draft, config, loss, memory)
    draft.model.train()
    problem = _take_steps(student, examples, figures, states, seed, on_step)
    draft.model.eval()
    kept = student.finish(len(figures.losses))
    tenth = max(1, len(figures.losses) // 10)
    result = UpdateResult(
        steps=len(figures.losses),
        tokens=figures.tokens,
        bad_steps=student.bad_steps.total,
        loss=_mean(figures.losses[:tenth]),
        loss_at_end=_mean(figures.losses[-tenth:]),
        seconds=time.monotonic() - started,
        cpu_s=time.process_time() - cpu,
        problem=problem or _problem_of(draft, figures),
        alpha=_mean(figures.alphas[:tenth]),
        alpha_at_end=_mean(figures.alphas[-tenth:]),
    )
    return result, None if result.problem else kept


class _Student:
    """The draft with its optimizer."""

    def __init__(
        self,
        draft: LanguageModel,
        config: AdaptConfig,
        loss: LossConfig,
        memory: Memory | None,
    ) -> None:
        self.draft, self.config = draft, config
        self.bad_steps = BadSteps(config.max_bad_steps)
        choose_trainable(draft, train_embeddings=False)
        settings = TrainConfig(max_steps=config.max_steps, learning_rate=config.learning_rate)
        self._module = DistillModule(draft, loss, Unrolling.of(settings))
        self._strategy = SingleProcessStrategy(self._module, lambda module: make_optimizer(module, settings))
        restored = memory is not None and memory.restore(self._strategy.optimizer, draft.model)
        self.steps_before = memory.steps if memory is not None and restored else 0

    def take_step(self, batch: ExampleBatch, learning_rate: float) -> StepResult:
        """Learn from one batch."""
        assert isinstance(batch.batch.signal, TeacherSignal), "every logged answer has a compressed signal"
        weighted = WeightedBatch(batch.batch, SignalTeacher(batch.batch.signal), batch.weights, batch.counted)
        return take_step(
            self._strategy, self._module, [weighted], learning_rate=learning_rate, clip_norm=self.config.clip_norm
        )

    def finish(self, steps: int) -> Memory:
        """Return what the next update goes on with."""
        return Memory.of(self.steps_before + steps, self._strategy.optimizer, self.draft.model)


def _take_steps(
    student: _Student,
    examples: Sequence[TrainingExample],
    figures: _Figures,
    states: StateStore | None,
    seed: int,
    on_step: Callable[[int], None] | None,
) -> str:
    """Take the steps of an update. Return its problem if too many in a row were not finite, else an empty text."""
    config = student.config
    for step, batch in enumerate(
        islice(example_batches(examples, config, student.draft, seed, states), config.max_steps)
    ):
        if on_step is not None:
            on_step(step)
        rising = min(1.0, (student.steps_before + step + 1) / WARM_UP)
        result = student.take_step(batch, config.learning_rate * rising)
        if student.bad_steps.count(result):
            return f"{student.bad_steps.in_a_row} steps in a row were not finite ({result.problem})"
        if result.taken:
            figures.add(result, batch)
    return ""


def _problem_of(draft: LanguageModel, figures: _Figures) -> str:
    if not figures.losses:
        return "no step was finite"
    finite = all(bool(torch.isfinite(p).all()) for p in draft.model.parameters())
    return "" if finite else "weights became NaN or infinite"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
