"""Training loop: steps, with refreshes, evaluations and saves in between."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from distillspec.config import TrainCommand
from distillspec.errors import Interrupted, RunError
from distillspec.models import LanguageModel, save_draft
from distillspec.models.checkpoint import METADATA, SERVED
from distillspec.models.target_copy import TargetCopy, save_target
from distillspec.sampling import NonFiniteLogits
from distillspec.training.checkpoint import Checkpoint, Generators, load_newest, save_checkpoint
from distillspec.training.feed import SampleFeed
from distillspec.training.interrupts import StopRequest
from distillspec.training.module import DistillModule
from distillspec.training.processes import agree, from_main, total
from distillspec.training.schedule import (
    EvaluationSchedule,
    Progress,
    fraction_done,
    learning_rate_factor,
    refresh_fits,
    stopped_by,
)
from distillspec.training.step import BadSteps, WeightedBatch, step_values, take_step
from distillspec.training.strategies import Strategy
from distillspec.training.token_weights import shared_by_sequence, token_weights
from distillspec.training.tracking import Tracker
from distillspec.types import Sample, TokenBatch

TARGET = "target"  # folder of a run's target, where it trained too

Evaluate = Callable[[LanguageModel], dict[str, float]]  # scalars named eval/…, among them eval/alpha
Refresh = Callable[[LanguageModel, int], list[Sample]]  # fresh samples from the current draft at a step
Report = Callable[[Progress, dict[str, float]], None]


@dataclass(frozen=True)
class RunModels:
    """Models of a run.

    Attributes:
        target: what the draft learns from.
        reference: a draft that tokens are selected by (AdaSPEC).
        target_copy: the target that trains with the draft, evaluated and saved with it.
    """

    draft: LanguageModel
    target: LanguageModel
    reference: LanguageModel | None = None
    target_copy: TargetCopy | None = None


@dataclass(frozen=True)
class RunHooks:
    """Functions that a run calls.

    Attributes:
        refresh: of an on-policy run.
        report: takes the figures of every step and evaluation.
    """

    evaluate: Evaluate
    refresh: Refresh | None = None
    report: Report = lambda progress, values: None
    clock: Callable[[], float] = time.perf_counter


@dataclass(frozen=True)
class TrainResult:
    """End of a run."""

    progress: Progress
    stopped_by: str
    best: dict[str, Any]
    bad_steps: int

    @classmethod
    def read(cls, path: Path) -> TrainResult:
        """Read the JSON that the main process of a launch left."""
        record = json.loads(path.read_text())
        return cls(**{**record, "progress": Progress(**record["progress"])})


class Trainer:
    """One training run. Every process of a launch calls `run`, once.

    Args:
        evaluation_s: seconds that an evaluation is expected to take, until this run has measured one.
    """

    def __init__(
        self,
        models: RunModels,
        module: DistillModule,
        strategy: Strategy,
        feed: SampleFeed,
        config: TrainCommand,
        folder: Path,
        tracker: Tracker,
        hooks: RunHooks,
        *,
        stop: StopRequest | None = None,
        evaluation_s: float = 0.0,
    ) -> None:
        self.draft, self.target = models.draft, models.target
        self.reference, self.target_copy = models.reference, models.target_copy
        self.module, self.strategy = module, strategy
        self.feed = feed
        self.config = config
        self.folder = folder
        self.tracker = tracker
        self.evaluate, self.refresh = hooks.evaluate, hooks.refresh
        self.report, self.clock = hooks.report, hooks.clock
        self.stop = stop or StopRequest()
        self.progress = Progress(evaluation=evaluation_s)
        self.best: dict[str, Any] | None = None
        self.bad_steps = BadSteps(config.train.max_bad_steps)
        self._evaluations = EvaluationSchedule(config.train)
        self._evaluated_step: int | None = None
        self._best = folder / "best"

    @property
    def is_main(self) -> bool:
        return self.strategy.accelerator.is_main_process

    def resume(self) -> list[str]:
        """Continue from the newest intact checkpoint, and return the problems of newer ones."""
        checkpoint, problems = load_newest(self.folder / "checkpoints")
        self.strategy.restore(checkpoint.strategy)
        self.feed.restore(checkpoint.feed, checkpoint.fresh_samples)
        self.progress, self.best = checkpoint.progress, checkpoint.best
        self.bad_steps.total, self._evaluated_step = checkpoint.bad_steps, checkpoint.evaluated_step
        checkpoint.rng.restore(self.strategy.accelerator.device)
        if not (self._best / METADATA).is_file():  # the run was killed while it replaced target and draft
            self.best, self._evaluated_step = None, None
        return problems

    def run(self) -> TrainResult:
        """Train to the first limit.

        Raises:
            Interrupted: a signal came, and the state is saved.
            RunError: `train.max_bad_steps` steps in a row were not finite, or an evaluation met NaN or infinity.
        """
        settings = self.config.train
        self.module.train()
        self._evaluations.plan(self.progress)
        self._counted_until = self.clock()
        while (reason := stopped_by(self.progress, settings)) is None:
            if agree(self.strategy.accelerator, self.stop.requested):
                self.save()
                raise self._interrupted()
            if self._refresh_due():
                self._refresh_samples()
            self._step()
            if self._evaluations.due(self.progress):
                self._evaluate_and_save()
            elif settings.save_every is not None and self.progress.step % settings.save_every == 0:
                self.save()
        if self._evaluated_step != self.progress.step:
            self._evaluate_and_save()
        if agree(self.strategy.accelerator, self.stop.requested):  # it came in the last step, or in the evaluation
            raise self._interrupted()
        assert self.best is not None
        return TrainResult(self.progress, reason, self.best, self.bad_steps.total)

    def _interrupted(self) -> Interrupted:
        return Interrupted(self.stop.signal_number or 15, f"distill train resume={self.folder}")

    def _step(self) -> None:
        started = self.clock()
        settings = self.config.train
        fraction = fraction_done(self.progress, settings)
        if self.progress.step == 0:
            self.progress = replace(self.progress, began=fraction)
        rate = settings.learning_rate * learning_rate_factor(fraction, settings, self.progress.began)
        self.module.begin_step(fraction)
        batches = [self.feed.take().to(self.strategy.accelerator.device) for _ in range(settings.accumulate)]
        weighted = [self.weighted(batch) for batch in batches]
        result = take_step(self.strategy, self.module, weighted, learning_rate=rate, clip_norm=settings.clip_norm)
        if self.bad_steps.count(result):
            raise RunError(
                f"{self.bad_steps.in_a_row} steps in a row were not finite at step {self.progress.step} "
                f"({result.problem}); {self._way_out()}"
            )
        tokens_per_s = result.tokens / max(self.clock() - started, 1e-9)
        step, tokens = self.progress.step + 1, self.progress.tokens + result.tokens
        self.progress = replace(self.progress, step=step, tokens=tokens)
        self._count_time()
        values = step_values(result, rate, tokens_per_s, self.bad_steps.total)
        self._log(values)
        self.report(self.progress, values)

    def weighted(self, batch: TokenBatch) -> WeightedBatch:
        teacher = self.module.teacher(batch, self.target)
        weights = token_weights(self.strategy.module, self.module, batch, teacher, self.target, self.reference)
        if self.config.train.mean == "sequence":
            weights = weights * shared_by_sequence(batch)
        return WeightedBatch(batch, teacher, weights, counted=weights)

    def _way_out(self) -> str:
        return f"lower train.learning_rate={self.config.train.learning_rate} and continue with resume={self.folder}"

    def _log(self, values: dict[str, float]) -> None:
        if self.is_main:
            head = {
                "step": self.progress.step,
                "tokens": self.progress.tokens,
                "seconds": self.progress.seconds,
            }
            self.tracker.log({**head, **values})

    def _refresh_due(self) -> bool:
        """Return True for an on-policy run every `data.refresh_steps`, if time is left or there are no samples yet."""
        if self.refresh is None or self.progress.step % self.config.data.refresh_steps != 0:
            return False
        return not self.feed.samples or refresh_fits(self.progress, self.config.train)

    def _refresh_samples(self) -> None:
        assert self.refresh is not None
        self._count_time()
        before = self.progress.seconds
        draft = self.strategy.refresh_plain(self.draft)
        self.feed.renew(self.refresh(draft, self.progress.step))
        self._count_time()
        self.progress = replace(self.progress, refresh=self.progress.seconds - before)
        self.module.train()

    def _evaluate_and_save(self) -> None:
        """Measure acceptance on held-out prompts, keep the draft if it is the best so far, save the state."""
        self._count_time()
        before = self.progress
        draft = self.strategy.refresh_plain(self.draft)
        self.best = from_main(self.strategy.accelerator, lambda: self._evaluate(draft))
        self.module.train()
        self._evaluated_step = self.progress.step
        self._count_evaluation(before)
        self.save()
        self._count_evaluation(before)
        self._evaluations.plan(self.progress)

    def _count_evaluation(self, before: Progress) -> None:
        """Count the time since `before` as an evaluation. Called before the save too, which stores it."""
        self._count_time()
        taken = self.progress.seconds - before.seconds
        self.progress = replace(self.progress, evaluating=before.evaluating + taken, evaluation=taken)

    def _evaluate(self, draft: LanguageModel) -> dict[str, Any]:
        """Evaluate `draft`, save it if it is the best so far, and return step and α of the best."""
        target = self.target if self.target_copy is None else self.target_copy.refresh()
        try:
            values = self.evaluate(draft)
        except NonFiniteLogits as error:
            raise RunError(
                f"the draft cannot be evaluated after step {self.progress.step} ({error}); {self._way_out()}"
            ) from error
        self._log(values)
        self.report(self.progress, values)
        if self.best is not None and values["eval/alpha"] <= self.best["alpha"]:
            return self.best
        best = {"step": self.progress.step, "alpha": values["eval/alpha"]}
        if self.target_copy is not None:
            (self._best / METADATA).unlink(missing_ok=True)  # a kill from here on leaves no pair of two steps
            save_target(target, self.folder / TARGET)
        save_draft(draft, self._best, target, {"training": best}, dtype=SERVED)
        return best

    def save(self) -> None:
        state = self.strategy.state()
        if not self.is_main:
            return
        checkpoint = Checkpoint(
            self.progress,
            state,
            self.feed.state(),
            Generators.now(self.strategy.accelerator.device),
            self.best,
            self.bad_steps.total,
            self._evaluated_step,
            self.feed.samples if self.refresh is not None else None,
        )
        save_checkpoint(self.folder / "checkpoints", checkpoint, self.config.train.keep_checkpoints)

    def _count_time(self) -> None:
        """Add the time since the last count: the slowest process's, so that all reach the limit at one step."""
        seconds = total(self.strategy.accelerator, self.clock() - self._counted_until, largest=True)
        self._counted_until = self.clock()
        self.progress = replace(self.progress, seconds=self.progress.seconds + seconds)
