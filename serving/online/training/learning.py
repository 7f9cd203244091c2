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
from distillspec.serving.online.training.adapters import Adapters
from distillspec.serving.online.training.examples import (
    ExampleBatch,
    TrainingExample,
    by_domain,
    count_batches,
    domain_shares,
    example_batches,
)
from distillspec.signals import TeacherSignal
from distillspec.training.chains import Unrolling
from distillspec.training.module import Anchor, DistillModule
from distillspec.training.optimizer import choose_trainable, make_optimizer
from distillspec.training.state_store import StateStore
from distillspec.training.step import BadSteps, StepResult, WeightedBatch, take_step
from distillspec.training.strategies import SingleProcessStrategy

WARM_UP = 10  # steps


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
    anchor: LanguageModel | None = None,
    states: StateStore | None = None,
    seed: int = 0,
    on_step: Callable[[int], None] | None = None,
) -> UpdateResult:
    """Train `draft` (float32 weights) in place.

    A step whose loss or gradient is not finite is skipped. `max_bad_steps` of them in a row end the update with a
    problem. The weights must not be used then.

    Args:
        anchor: the draft that the weights stay close to, by `adapt.anchor`.
        states: the target's states, for a draft that reads some.
        on_step: called with each step's number, from 0.

    Raises:
        RunError: no token of `examples` has a weight.
    """
    if not any(bool((example.weights > 0).any()) for example in examples):
        raise RunError("no logged token has a weight; use adapt.positions=all, or wait for more requests")
    started, cpu = time.monotonic(), time.process_time()
    figures, student = _Figures(), _Student(draft, config, loss, anchor, domain_shares(examples))
    draft.model.train()
    problem = _take_steps(student, examples, figures, states, seed, on_step)
    draft.model.eval()
    student.finish()
    tenth = max(1, len(figures.losses) // 10)
    return UpdateResult(
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


class _Student:
    """The draft with its optimizer. With `adapt.lora_rank` only adapters learn, merged at the end."""

    def __init__(
        self,
        draft: LanguageModel,
        config: AdaptConfig,
        loss: LossConfig,
        anchor: LanguageModel | None,
        shares: dict[str, float],
    ) -> None:
        self.draft, self.config = draft, config
        self.bad_steps = BadSteps(config.max_bad_steps)
        choose_trainable(draft, train_embeddings=False)
        self._adapters: Adapters | None = None
        if config.lora_rank:
            self._adapters = Adapters(draft, config.lora_rank, shares if config.lora_by == "domain" else {"": 1.0})
        settings = TrainConfig(max_steps=config.max_steps, learning_rate=config.learning_rate)
        unrolling = Unrolling(settings.unroll, settings.unroll_decay)
        near = None if anchor is None else Anchor(anchor, config.anchor)
        self._module = DistillModule(draft, loss, near, unrolling)
        self._strategy = SingleProcessStrategy(self._module, lambda module: make_optimizer(module, settings))

    def take_step(self, batch: ExampleBatch, learning_rate: float) -> StepResult:
        """Learn from one batch, which is of its first sample's domain where domains learn apart."""
        if self._adapters is not None:
            self._adapters.choose(batch.batch.domains[0])
        assert isinstance(batch.batch.signal, TeacherSignal), "every logged answer has a compressed signal"
        weighted = WeightedBatch(batch.batch, SignalTeacher(batch.batch.signal), batch.weights, batch.counted)
        return take_step(
            self._strategy, self._module, [weighted], learning_rate=learning_rate, clip_norm=self.config.clip_norm
        )

    def finish(self) -> None:
        """Merge the adapters into the draft's weights."""
        if self._adapters is not None:
            self._adapters.merge()


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
    apart = config.lora_rank > 0 and config.lora_by == "domain"
    groups = by_domain(examples) if apart else [examples]
    steps = min(config.max_steps, sum(count_batches(group, config, seed) for group in groups))
    for step, batch in enumerate(
        islice(example_batches(groups, config, student.draft, seed, states), config.max_steps)
    ):
        result = student.take_step(batch, _learning_rate(step, steps, config))
        if student.bad_steps.count(result):
            return f"{student.bad_steps.in_a_row} steps in a row were not finite ({result.problem})"
        if result.taken:
            figures.add(result, batch)
        if on_step is not None:
            on_step(step)
    return ""


def _learning_rate(step: int, steps: int, config: AdaptConfig) -> float:
    """Return the rate at `step`: it rises over the first ten steps, or over half of a short update, and then stays.

    Adam's first steps are the least informed.
    """
    rising = max(1, min(WARM_UP, steps // 2))
    return config.learning_rate * min(1.0, (step + 1) / rising)


def _problem_of(draft: LanguageModel, figures: _Figures) -> str:
    if not figures.losses:
        return "no step was finite"
    finite = all(bool(torch.isfinite(p).all()) for p in draft.model.parameters())
    return "" if finite else "weights became NaN or infinite"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
