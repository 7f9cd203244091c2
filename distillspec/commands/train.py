"""`distill train`: data, draft, training, and what it gained."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from distillspec.commands.prepare import (
    fresh_samples,
    prepare_draft,
    prepare_folder,
    prepare_held_out,
    prepare_samples,
    recorded_answers,
)
from distillspec.commands.run_folder import close_run, open_run, plain
from distillspec.commands.suitability import check_plan, check_samples
from distillspec.config import TrainCommand
from distillspec.data.collect import with_writer_logprobs
from distillspec.data.folder import DataFolder
from distillspec.data.prompts import stable_seed
from distillspec.data.shards import read_samples
from distillspec.evaluation import EvaluationResult, TargetStates, evaluate
from distillspec.files import write_json
from distillspec.generation import make_generator
from distillspec.losses import LossMix
from distillspec.models import LanguageModel, check_draft, load_draft, load_target, read_metadata, save_draft
from distillspec.progress import ProgressLine, progress
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
from distillspec.types import GenerationRequest, Sample


@dataclass(frozen=True)
class Judge:
    """Judges the drafts of one run on its held-out answers; the target reads them once."""

    config: TrainCommand
    held_out: list[Sample]
    states: TargetStates

    def whole(self, draft: LanguageModel) -> EvaluationResult:
        """Everything, with costs."""
        result = self._evaluate(draft, max_prompts=None)
        self.states.save()
        return result

    def quick(self, draft: LanguageModel) -> dict[str, float]:
        """Acceptance on the first held-out prompts, as the scalars that curves are made of."""
        result = self._evaluate(draft, max_prompts=self.config.train.eval_max_prompts)
        gamma = min(4, len(result.tau))
        values = {
            "eval/alpha": result.alpha.mean,
            "eval/alpha_low": result.alpha.low,
            "eval/alpha_high": result.alpha.high,
            "eval/greedy_agreement": result.greedy_agreement.mean,
            f"eval/tau_{gamma}": result.tau[gamma - 1].mean,
        }
        return values | {f"eval/alpha/{domain}": i.mean for domain, i in result.alpha_by_domain.items()}

    def _evaluate(self, draft: LanguageModel, max_prompts: int | None) -> EvaluationResult:
        return evaluate(
            draft,
            self.states.target,
            self.held_out,
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
    close_run(folder, "train", _summary(result, before, after, folder) | {"nothing_learned": problem})
    _print_gain(before, after)
    if problem is not None:
        print(problem)


def prepare(config: TrainCommand, folder: Path, target: LanguageModel) -> tuple[DataFolder, list[Sample], list[Sample]]:
    """The data folder, the training samples (none for an on-policy run) and the held-out answers; made once."""
    data = prepare_folder(config.data, target, folder / "data", config.seed)
    # A cache gives an on-policy run its prompts and held-out answers; the draft writes the samples.
    samples = [] if config.data.on_policy else prepare_samples(config.data, target, data, config.seed)
    return data, samples, prepare_held_out(config.data, config.sampling.policy, target, data, config.seed)


def _train_in_ranks(config: TrainCommand, folder: Path, target: LanguageModel) -> TrainResult:
    """The training in the processes of `launcher=`, which read the prepared folder and call `train` each."""
    device = target.device
    target.model.to("cpu")  # leaves a GPU to the processes
    try:
        command = [sys.executable, "-P", "-m", "distillspec.commands.train_rank", str(folder)]
        launch(config.launcher, config.target.device, command, folder)
    finally:
        target.model.to(device)
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
    draft = load_draft(folder / "initial", target)
    accelerator = make_accelerator(config, draft.head.weight.shape[1])
    choose_trainable(draft, config.draft.train_embeddings)
    module = DistillModule(draft, config.loss).to(accelerator.device)
    strategy = make_strategy(config, accelerator, module)
    prompts = data.read_prompts().train
    feed = SampleFeed(
        samples,  # none yet for an on-policy run: its trainer asks for them at the first step
        config.train,
        target.tokenizer.eos_token_id,
        config.seed,
        accelerator.process_index,
        accelerator.num_processes,
    )

    recorded = recorded_answers(config.data, target, data)

    def sample(model: LanguageModel, step: int) -> list[Sample]:
        samples = fresh_samples(config.data, target, model, prompts, config.seed, step, recorded)
        if not module.mix.needs_draft_samples:
            return samples
        return with_writer_logprobs(samples, model, config.data.policy)

    resuming = config.resume is not None and (folder / "checkpoints").is_dir()
    with listen_for_stop() as stop, progress("training") as line:
        tracker = Tracker(accelerator, config.tracker, folder)
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
            report=_Reporter(line, config, _untrained_alpha(folder)),
        )
        if resuming:
            for problem in trainer.resume():
                print(f"skipped a damaged checkpoint: {problem}")
            tracker.rewind(trainer.progress.step)
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
            words.append(f"{now.tokens / now.seconds:.0f} tokens/s")
        self.line.update(fraction, f"{', '.join(words)}, {self.line.left(fraction)} left")

    def _warn(self, now: Progress) -> None:
        """Once a run: an end without gain is said by the summary."""
        problem = nothing_learned(self.config, self.before, self.best, self.shown, now.tokens)
        if problem is not None:
            print(f"step {now.step}: {problem}", flush=True)
            self.warned = True


def _untrained_alpha(folder: Path) -> float:
    return float(json.loads((folder / "before.json").read_text())["alpha"]["mean"])


def _before(
    config: TrainCommand, judge: Judge, data: DataFolder, samples: list[Sample], folder: Path
) -> dict[str, Any]:
    """Write the untrained draft to `folder/initial` and measure it, once a run."""
    record = folder / "before.json"
    if record.is_file() and (folder / "initial").is_dir():
        return json.loads(record.read_text())
    target = judge.states.target
    draft = prepare_draft(config.draft, target, lambda: _target_texts(config, target, data, samples))
    save_draft(draft, folder / "initial", target)
    with progress("measuring the untrained draft"):
        result = judge.whole(draft)
    write_json(record, result.to_json())
    return result.to_json()


def _target_texts(config: TrainCommand, target: LanguageModel, data: DataFolder, samples: list[Sample]) -> list[Sample]:
    """Target-written text that the draft's vocabulary (and layers) are chosen by; never the held-out answers.

    Text of others with the target's recorded signal says as much. Other runs have the target answer a few training
    prompts, unless their cache holds such answers.
    """
    if config.data.source == "teacher" or (samples and all(sample.signal is not None for sample in samples)):
        return samples
    if config.data.cache is not None and config.data.source != "fixed":
        return read_samples(data.samples, target.identity)
    prompts = data.read_prompts().train[: config.data.refresh_prompts]
    requests = [
        GenerationRequest(p, config.data.max_new_tokens, stable_seed(config.seed, "vocabulary", p.id)) for p in prompts
    ]
    generator = make_generator(config.data.generator, target, slots=config.data.batch_slots)
    written = generator.generate(requests, config.data.policy, stop_ids=target.stop_ids)
    return samples + [sample for _, sample in written]


def _summary(result: TrainResult, before: dict[str, Any], after: EvaluationResult, folder: Path) -> dict[str, Any]:
    used = result.progress
    return {
        "before": before,
        "after": after.to_json(),
        "best": result.best,
        "steps": used.step,
        "tokens": used.tokens,
        "minutes": used.seconds / 60,
        "tokens_per_s": used.tokens / max(used.seconds, 1e-9),
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
    for batch, speedup in (after.speedup or {}).items():
        print(f"batch {batch}: {speedup.verdict}")
