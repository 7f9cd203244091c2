"""The training loop: take a batch, step, and now and then evaluate and save."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from distillspec.config import TrainCommand
from distillspec.errors import Interrupted, RunError
from distillspec.models import LanguageModel, save_draft
from distillspec.sampling import NonFiniteLogits
from distillspec.training.advantages import batch_advantages
from distillspec.training.checkpoint import Checkpoint, Generators, load_newest, save_checkpoint
from distillspec.training.feed import SampleFeed
from distillspec.training.interrupts import StopRequest
from distillspec.training.module import DistillModule, defined_at, teacher_view, token_weights
from distillspec.training.processes import agree, from_main, total, totals
from distillspec.training.schedule import (
    Progress,
    evaluation_fits,
    fraction_done,
    learning_rate_factor,
    refresh_fits,
    stopped_by,
)
from distillspec.training.strategies import Strategy
from distillspec.training.tracking import Tracker
from distillspec.types import Sample, TokenBatch

Evaluate = Callable[[LanguageModel], dict[str, float]]  # scalars named eval/…, among them eval/alpha
Refresh = Callable[[LanguageModel, int], list[Sample]]  # fresh samples from the current draft at a step
Report = Callable[[Progress, dict[str, float]], None]

LOGGED = ("weight", "valid_weight", "loss", "alpha", "outside")  # of a loss's metrics


@dataclass(frozen=True)
class TrainResult:
    """How a run ended."""

    progress: Progress
    stopped_by: str
    best: dict[str, Any]
    bad_steps: int

    @classmethod
    def read(cls, path: Path) -> TrainResult:
        """From the JSON that the main process of a launch left."""
        record = json.loads(path.read_text())
        return cls(**{**record, "progress": Progress(**record["progress"])})


class Trainer:
    """One training run. `run` may be called once; every process of a launch calls it."""

    def __init__(
        self,
        draft: LanguageModel,
        target: LanguageModel,
        module: DistillModule,
        strategy: Strategy,
        feed: SampleFeed,
        config: TrainCommand,
        folder: Path,
        tracker: Tracker,
        *,
        evaluate: Evaluate,
        refresh: Refresh | None = None,
        reference: LanguageModel | None = None,
        stop: StopRequest | None = None,
        report: Report | None = None,
        evaluation_s: float = 0.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """`evaluation_s`: what an evaluation is expected to take, until the first of this run shows it."""
        self.draft, self.target, self.module, self.strategy = draft, target, module, strategy
        self.feed, self.config, self.folder, self.tracker = feed, config, folder, tracker
        self.evaluate, self.refresh, self.reference = evaluate, refresh, reference
        self.stop = stop or StopRequest()
        self.report = report or (lambda progress, values: None)
        self.progress = Progress(evaluation=evaluation_s)
        self.clock = clock
        self.best: dict[str, Any] | None = None
        self.bad_steps = self.bad_in_a_row = 0
        self._last_problem = ""
        self._evaluated_step: int | None = None
        self._next_evaluation = 0.0

    @property
    def is_main(self) -> bool:
        return self.strategy.accelerator.is_main_process

    def resume(self) -> list[str]:
        """Go on from the newest intact checkpoint; returns what was wrong with newer ones."""
        checkpoint, problems = load_newest(self.folder / "checkpoints")
        self.strategy.restore(checkpoint.strategy)
        self.feed.restore(checkpoint.feed, checkpoint.fresh_samples)
        self.progress, self.best = checkpoint.progress, checkpoint.best
        self.bad_steps, self._evaluated_step = checkpoint.bad_steps, checkpoint.evaluated_step
        checkpoint.rng.restore(self.strategy.accelerator.device)
        return problems

    def run(self) -> TrainResult:
        """Train to the first limit.

        Raises:
            Interrupted: a signal came; the state is saved.
            RunError: `train.max_bad_steps` steps in a row were not finite, or an evaluation met such weights.
        """
        settings = self.config.train
        self.module.train()
        self._next_evaluation = self._evaluation_after(self.progress)
        self._counted_until = self.clock()
        while (reason := stopped_by(self.progress, settings)) is None:
            if agree(self.strategy.accelerator, self.stop.asked):
                self._save()
                raise Interrupted(self.stop.signal_number or 15, f"distill train resume={self.folder}")
            if self._refresh_due():
                self._refresh_samples()
            self._step()
            if self._evaluation_due():
                self._evaluate_and_save()
            elif settings.save_every is not None and self.progress.step % settings.save_every == 0:
                self._save()
        if self._evaluated_step != self.progress.step:
            self._evaluate_and_save()
        assert self.best is not None
        return TrainResult(self.progress, reason, self.best, self.bad_steps)

    def _step(self) -> None:
        started = self.clock()
        factor = learning_rate_factor(fraction_done(self.progress, self.config.train), self.config.train)
        for group in self.strategy.optimizer.param_groups:
            group["lr"] = self.config.train.learning_rate * factor
        batches = [self.feed.take().to(self.strategy.accelerator.device) for _ in range(self.config.train.accumulate)]
        tokens, sums, norm = self._gradients(batches)
        finite = not agree(self.strategy.accelerator, not math.isfinite(norm))
        if finite:
            self.strategy.update()
        else:
            self.strategy.skip()
        self._count_bad(finite)
        rate = tokens / max(self.clock() - started, 1e-9)
        self.progress = replace(self.progress, step=self.progress.step + 1, tokens=self.progress.tokens + tokens)
        self._count_time()
        self._log_step(sums, norm, factor, rate)

    def _gradients(self, batches: list[TokenBatch]) -> tuple[int, dict[str, float], float]:
        """Backward over the micro-batches; response tokens of all processes, loss sums, gradient norm."""
        accelerator = self.strategy.accelerator
        tokens = total(accelerator, sum(batch.response_tokens for batch in batches))
        sums = dict.fromkeys(LOGGED, 0.0)
        self.module.problem = None
        weighted = [self._weigh(batch) for batch in batches]
        # Gradients are averaged over processes, so each divides by its share of all weights where there is a loss.
        counted = [float((w * self._defined(batch)).sum()) for batch, (_, w) in zip(batches, weighted, strict=True)]
        share = total(accelerator, sum(counted)) / accelerator.num_processes
        ranked = batch_advantages(self.strategy, self.module, batches, [teacher for teacher, _ in weighted])
        for i, (batch, (teacher, weights)) in enumerate(zip(batches, weighted, strict=True)):
            with self.strategy.micro_step(last=i == len(batches) - 1):
                result = self.strategy.module(batch, teacher, weights, max(share, 1e-9), ranked[i])
                self.strategy.backward(result.loss)
            for name in LOGGED:
                sums[name] += float(result.metrics.get(name, math.nan))
        norm = self.strategy.clip(self.config.train.clip_norm)
        if not math.isfinite(norm):
            self._last_problem = self.module.problem or f"the gradient norm is {norm}"
        return int(tokens), dict(zip(LOGGED, totals(accelerator, list(sums.values())), strict=True)), norm

    def _weigh(self, batch: TokenBatch) -> tuple[Any, torch.Tensor]:
        teacher = teacher_view(self.module.mix, batch, self.target)
        return teacher, token_weights(self.strategy.module, self.module, batch, teacher, self.reference)

    def _defined(self, batch: TokenBatch) -> torch.Tensor:
        return defined_at(self.module.mix, batch, self.module.kept_ids, self.draft.width)

    def _count_bad(self, finite: bool) -> None:
        if finite:
            self.bad_in_a_row = 0
            return
        self.bad_steps += 1
        self.bad_in_a_row += 1
        if self.bad_in_a_row >= self.config.train.max_bad_steps:
            raise RunError(
                f"{self.bad_in_a_row} steps in a row were not finite at step {self.progress.step} "
                f"({self._last_problem}); {self._way_out()}"
            )

    def _way_out(self) -> str:
        return f"lower train.learning_rate={self.config.train.learning_rate} and continue with resume={self.folder}"

    def _log_step(self, sums: dict[str, float], norm: float, factor: float, rate: float) -> None:
        values = {
            "train/grad_norm": norm,
            "train/lr": self.config.train.learning_rate * factor,
            "train/tokens_per_s": rate,
            "train/bad_steps": float(self.bad_steps),
        }
        if sums["weight"] > 0:
            values.update({f"train/{k}": sums[k] / sums["weight"] for k in ("alpha", "outside")})
        if sums["valid_weight"] > 0:
            values["train/loss"] = sums["loss"] / sums["valid_weight"]
        values = {k: v for k, v in values.items() if math.isfinite(v)}
        self._log(values)
        self.report(self.progress, values)

    def _log(self, values: dict[str, float]) -> None:
        if self.is_main:
            head = {
                "step": self.progress.step,
                "tokens": self.progress.tokens,
                "seconds": self.progress.seconds,
            }
            self.tracker.log({**head, **values})

    def _refresh_due(self) -> bool:
        """On-policy, every `data.refresh_steps`: always where there is nothing to learn from, else if time is left."""
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
        self.best = from_main(self.strategy.accelerator, lambda: self._judge(draft))
        self.module.train()
        self._evaluated_step = self.progress.step
        self._count_evaluation(before)
        self._save()
        self._count_evaluation(before)
        self._next_evaluation = self._evaluation_after(self.progress)

    def _count_evaluation(self, before: Progress) -> None:
        """Book the time since `before` as an evaluation; called before the save too, which keeps it."""
        self._count_time()
        taken = self.progress.seconds - before.seconds
        self.progress = replace(self.progress, evaluating=before.evaluating + taken, evaluation=taken)

    def _judge(self, draft: LanguageModel) -> dict[str, Any]:
        """Evaluate; the best draft so far, which is this one's if it is better than those before."""
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
        save_draft(draft, self.folder / "best", self.target, {"training": best})
        return best

    def _save(self) -> None:
        state = self.strategy.state()
        if not self.is_main:
            return
        checkpoint = Checkpoint(
            self.progress,
            state,
            self.feed.state(),
            Generators.now(self.strategy.accelerator.device),
            self.best,
            self.bad_steps,
            self._evaluated_step,
            self.feed.samples if self.refresh is not None else None,
        )
        save_checkpoint(self.folder / "checkpoints", checkpoint, self.config.train.keep_checkpoints)

    def _evaluation_due(self) -> bool:
        if self.config.train.eval_every is not None:
            return self.progress.step % self.config.train.eval_every == 0
        if fraction_done(self.progress, self.config.train) < self._next_evaluation:
            return False
        if not evaluation_fits(self.progress, self.config.train):
            self._next_evaluation = self._evaluation_after(self.progress)
            return False
        return True

    def _evaluation_after(self, progress: Progress) -> float:
        """Without `eval_every` a run is evaluated at each tenth of its way, where that fits its share of the time."""
        return (math.floor(fraction_done(progress, self.config.train) * 10 + 1e-9) + 1) / 10

    def _count_time(self) -> None:
        """Add the time since it was last counted: the slowest process's, so that all meet the limit at one step."""
        seconds = total(self.strategy.accelerator, self.clock() - self._counted_until, largest=True)
        self._counted_until = self.clock()
        self.progress = replace(self.progress, seconds=self.progress.seconds + seconds)
