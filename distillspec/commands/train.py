"""`distill train`: data, draft, training, and what it gained."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distillspec.commands.prepare import (
    answered_training_prompts,
    fresh_samples,
    prepare_draft,
    prepare_folder,
    prepare_held_out,
    prepare_samples,
    recorded_answers,
)
from distillspec.commands.run_folder import close_run, open_run, plain
from distillspec.commands.suitability import check_plan, check_samples, refreshes_kept, warn_of_noise
from distillspec.commands.unseen import known_before, with_trained_prompts
from distillspec.config import TrainCommand
from distillspec.data.collect import with_writer_logprobs
from distillspec.data.folder import DataFolder
from distillspec.data.held_out import split_held_out
from distillspec.data.shards import read_samples
from distillspec.evaluation import EvaluationResult, TargetStates, cut_line, cut_share, evaluate, timing_lines
from distillspec.files import read_object, write_json
from distillspec.losses import LossMix
from distillspec.models import LanguageModel, check_draft, load_draft, load_target, read_metadata, save_draft
from distillspec.models.memory import moved_off_device
from distillspec.progress import ProgressLine, progress
from distillspec.training.checkpoint import has_checkpoint
from distillspec.training.feed import SampleFeed
from distillspec.training.interrupts import listen_for_stop
from distillspec.training.launch import check_launcher, launch, record_holdings
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable
from distillspec.training.processes import from_main
from distillspec.training.schedule import Progress, fraction_done
from distillspec.training.strategies import make_accelerator, make_strategy
from distillspec.training.tracking import Tracker, last_values
from distillspec.training.trainer import Trainer, TrainResult
from distillspec.training.verdict import FAIR_SHARE, nothing_learned
from distillspec.types import Sample

BEFORE = "before.json"  # figures of the untrained draft


@dataclass(frozen=True)
class Judge:
    """Judges the drafts of one run on its held-out answers; the target reads them once.

    The best checkpoint is chosen on the first prompts (`train.eval_max_prompts`, at most half), and the rest is quoted.
    """

    config: TrainCommand
    held_out: list[Sample]
    states: TargetStates

    def whole(self, draft: LanguageModel) -> EvaluationResult:
        """Everything, with costs, on the prompts that choose nothing."""
        result = self._evaluate(draft, self._split[1], max_prompts=None)
        self.states.save()
        return result

    def quick(self, draft: LanguageModel) -> dict[str, float]:
        """Acceptance on the prompts that choose the best checkpoint, as the scalars that curves are made of."""
        result = self._evaluate(draft, self._split[0], max_prompts=self.selection_prompts)
        gamma = min(4, len(result.tau))
        values = {
            "eval/alpha": result.alpha.mean,
            "eval/alpha_low": result.alpha.low,
            "eval/alpha_high": result.alpha.high,
            "eval/greedy_agreement": result.greedy_agreement.mean,
            f"eval/tau_{gamma}": result.tau[gamma - 1].mean,
        }
        return values | {f"eval/alpha/{domain}": i.mean for domain, i in result.alpha_by_domain.items()}

    @property
    def selection_prompts(self) -> int:
        """How many prompts choose."""
        return len(self._split[0])

    @property
    def choosing(self) -> list[Sample]:
        """Held-out answers that choose the best checkpoint and are not quoted; none where one answer does both."""
        choosing, quoted = self._split
        return [] if choosing == quoted else choosing

    @property
    def _split(self) -> tuple[list[Sample], list[Sample]]:
        return split_held_out(self.held_out, self.config.train.eval_max_prompts)

    def _evaluate(self, draft: LanguageModel, samples: list[Sample], max_prompts: int | None) -> EvaluationResult:
        return evaluate(
            draft,
            self.states.target,
            samples,
            self.config.sampling.policy,
            self.config.evaluation,
            max_prompts=max_prompts,
            seed=self.config.seed,
            states=self.states,
        )


def run(config: TrainCommand, folder: Path) -> None:
    """Everything from nothing to a trained draft in `folder`; a resumed run skips what is done."""
    check_launcher(config.launcher, config.target.device)
    mix = LossMix.parse(config.loss.terms)  # a mistake in the mix should not wait for the weights
    check_plan(mix, config.data)
    torch.manual_seed(config.seed)
    open_run(folder, config)
    target = load_target(config.target)
    check_draft(config.draft, target)
    if config.loss.reference is not None:
        read_metadata(config.loss.reference)
    data, samples, held_out = prepare(config, folder, target)
    check_samples(mix, samples)
    judge = Judge(config, held_out, TargetStates(target, data.states))
    before = _before(config, judge, data, samples, folder)
    warn_of_noise(config.data, before["alpha"]["mean"])
    if config.launcher.kind == "local":
        result = train(config, folder, target, data, samples, held_out, judge)
    else:
        result = _train_in_ranks(config, folder, target)
    best = load_draft(folder / "best", target)
    with progress("measuring the trained draft"):
        after = judge.whole(best)
    save_draft(best, folder / "draft", target, {"training": result.best, "evaluation": after.to_json()})
    last = last_values(folder)
    problem = nothing_learned(config, before["alpha"]["mean"], after.alpha.mean, last, result.progress.tokens)
    apart = judge.selection_prompts if len(held_out) > 1 else None
    text = {"selection_prompts": apart, "training_answers_cut": cut_share(samples), "nothing_learned": problem}
    close_run(folder, "train", {**_summary(result, before, after, folder), **text})
    _print_gain(before, after)
    if problem is not None:
        print(problem)


def prepare(config: TrainCommand, folder: Path, target: LanguageModel) -> tuple[DataFolder, list[Sample], list[Sample]]:
    """The data folder, the training samples (none for an on-policy run) and the held-out answers; made once."""
    trained = known_before(config.draft)
    data = prepare_folder(config.data, target, folder / "data", config.seed, trained)
    # A cache gives an on-policy run its prompts and held-out answers; the draft writes the samples.
    samples = [] if config.data.on_policy else prepare_samples(config.data, target, data, config.seed)
    return data, samples, prepare_held_out(config.data, config.sampling.policy, target, data, config.seed, trained)


def _train_in_ranks(config: TrainCommand, folder: Path, target: LanguageModel) -> TrainResult:
    """The training in the processes of `launcher=`, which read the prepared folder and call `train` each."""
    command = [sys.executable, "-P", "-m", "distillspec.commands.train_rank", str(folder)]
    with moved_off_device(target):
        launch(config.launcher, config.target.device, command, folder)
    return TrainResult.read(folder / "training.json")


def train(
    config: TrainCommand,
    folder: Path,
    target: LanguageModel,
    data: DataFolder,
    samples: list[Sample],
    held_out: list[Sample],
    judge: Judge | None = None,
) -> TrainResult:
    """The training proper, from `folder/initial` (or a checkpoint) to `folder/best`."""
    judge = judge or Judge(config, held_out, TargetStates(target, data.states))
    prompts = data.read_prompts().train
    used = [*(p.token_ids for p in prompts), *(sample.prompt_ids for sample in judge.choosing)]
    draft = with_trained_prompts(load_draft(folder / "initial", target), used)
    accelerator = make_accelerator(config, draft.head.weight.shape[1])
    choose_trainable(draft, config.draft.train_embeddings)
    module = DistillModule(draft, config.loss).to(accelerator.device)
    strategy = make_strategy(config, accelerator, module)
    feed = SampleFeed(
        samples,  # none yet for an on-policy run: its trainer asks for them at the first step
        config.train,
        target.text_tokenizer.eos_token_id,
        config.seed,
        accelerator.process_index,
        accelerator.num_processes,
        keep=refreshes_kept(module.mix, config.data),
    )

    recorded = recorded_answers(config.data, target, data)

    def sample(model: LanguageModel, step: int) -> list[Sample]:
        samples = fresh_samples(config.data, target, model, prompts, config.seed, step, recorded)
        if not module.mix.needs_draft_samples:
            return samples
        return with_writer_logprobs(samples, model, config.data.policy)

    untrained = read_object(folder / BEFORE)
    resuming = config.resume is not None and has_checkpoint(folder / "checkpoints")
    with listen_for_stop() as stop, progress("training") as line:
        tracker = Tracker(accelerator, config.tracker, folder)
        reporter = _Reporter(line, config, untrained.get("selection_alpha", 0.0))
        trainer = Trainer(
            draft,
            target,
            module,
            strategy,
            feed,
            config,
            folder,
            tracker,
            evaluate=judge.quick,
            refresh=(lambda model, step: from_main(accelerator, lambda: sample(model, step)))
            if config.data.on_policy
            else None,
            reference=load_draft(config.loss.reference, target) if config.loss.reference else None,
            stop=stop,
            report=reporter,
            evaluation_s=untrained.get("evaluation_s", 0.0),
        )
        if resuming:
            for problem in trainer.resume():
                print(f"skipped a damaged checkpoint: {problem}")
            reporter.best = trainer.best["alpha"] if trainer.best else 0.0
        tracker.rewind(trainer.progress.step)  # to nothing, where a run was killed before its first checkpoint
        if accelerator.is_main_process:
            tracker.start(config.tracker, folder, plain(config))
        try:
            result = trainer.run()
            if config.launcher.kind != "local":
                record_holdings(folder, strategy)
            return result
        finally:
            tracker.close()


class _Reporter:
    """Turns the trainer's numbers into the words beside the progress bar."""

    def __init__(self, line: ProgressLine, config: TrainCommand, before: float) -> None:
        self.line, self.config, self.before = line, config, before
        self.shown: dict[str, float] = {}
        self.best, self.warned = 0.0, False

    def __call__(self, now: Progress, values: dict[str, float]) -> None:
        self.shown.update(values)
        fraction = fraction_done(now, self.config.train)
        if "eval/alpha" in values:
            self.best = max(self.best, values["eval/alpha"])
            if FAIR_SHARE <= fraction < 1 and not self.warned:
                self._warn(now)
        words = [f"step {now.step}"]
        for key, label in (("train/loss", "loss"), ("train/alpha", "α"), ("eval/alpha", "held-out α")):
            if key in self.shown:
                words.append(f"{label} {self.shown[key]:.3f}")
        if now.seconds > 0:
            words.append(f"{now.tokens_per_s:.0f} tokens/s")
        self.line.update(fraction, f"{', '.join(words)}, {self.line.left(fraction)} left")

    def _warn(self, now: Progress) -> None:
        """Once a run: an end without gain is said by the summary."""
        problem = nothing_learned(self.config, self.before, self.best, self.shown, now.tokens)
        if problem is not None:
            print(f"step {now.step}: {problem}", flush=True)
            self.warned = True


def _before(
    config: TrainCommand, judge: Judge, data: DataFolder, samples: list[Sample], folder: Path
) -> dict[str, Any]:
    """Write the untrained draft to `folder/initial` and measure it, once a run."""
    record = folder / BEFORE
    if record.is_file() and (folder / "initial").is_dir():
        return read_object(record)
    target = judge.states.target
    draft = prepare_draft(config.draft, target, lambda: _target_texts(config, target, data, samples))
    save_draft(draft, folder / "initial", target)
    with progress("measuring the untrained draft"):
        alpha = judge.quick(draft)["eval/alpha"]  # the target reads these answers here, and never again
        seconds = _evaluation_seconds(judge, draft) if config.train.max_minutes is not None else 0.0
        result = judge.whole(draft).to_json()
    before = {**result, "selection_alpha": alpha, "evaluation_s": seconds}
    write_json(record, before)
    return before


def _evaluation_seconds(judge: Judge, draft: LanguageModel) -> float:
    """How long an evaluation during training takes, once the target's part is known."""
    started = time.perf_counter()
    judge.quick(draft)
    return time.perf_counter() - started


def _target_texts(config: TrainCommand, target: LanguageModel, data: DataFolder, samples: list[Sample]) -> list[Sample]:
    """Target-written text that the draft's vocabulary (and layers) are chosen by; never the held-out answers.

    Text of others with the target's recorded signal says as much. Other runs have the target answer a few training
    prompts, unless their cache holds such answers.
    """
    if config.data.source == "teacher" or (samples and all(sample.signal is not None for sample in samples)):
        return samples
    if config.data.cache is not None and config.data.source != "fixed":
        return read_samples(data.samples, target.identity)
    return samples + answered_training_prompts(config.data, target, data, config.seed)


def _summary(result: TrainResult, before: dict[str, Any], after: EvaluationResult, folder: Path) -> dict[str, Any]:
    used = result.progress
    return {
        "before": before,
        "after": after.to_json(),
        "best": result.best,
        "steps": used.step,
        "tokens": used.tokens,
        "minutes": used.seconds / 60,
        "tokens_per_s": used.tokens_per_s,
        "stopped_by": result.stopped_by,
        "bad_steps": result.bad_steps,
        "draft": str(folder / "draft"),
    }


def _print_gain(before: dict[str, Any], after: EvaluationResult) -> None:
    gamma = min(4, len(after.tau))
    print(
        f"acceptance rate α {before['alpha']['mean']:.3f} → {after.alpha.mean:.3f} "
        f"[{after.alpha.low:.3f}, {after.alpha.high:.3f}], block efficiency τ({gamma}) "
        f"{before['tau'][gamma - 1]['mean']:.2f} → {after.tau[gamma - 1].mean:.2f}"
    )
    for line in filter(None, [*timing_lines(after), cut_line(after)]):
        print(line)
