"""`distill train`: data, draft, training, evaluation before and after."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from distillspec.commands.gain import print_gain, summary
from distillspec.commands.held_out import prepare_held_out
from distillspec.commands.held_out_evaluator import HeldOutEvaluator
from distillspec.commands.new_target import open_new_target, quick_with
from distillspec.commands.own_runs import typed_settings
from distillspec.commands.prompt_folder import prepare_folder
from distillspec.commands.recorded_states import recording
from distillspec.commands.run_folder import close_run, open_run, plain
from distillspec.commands.same_run import BEFORE, check_same_run
from distillspec.commands.samples import prepare_samples
from distillspec.commands.suitability import (
    check_confidence,
    check_plan,
    check_recorded,
    check_reference,
    check_samples,
    refreshes_kept,
    warn_of_noise,
)
from distillspec.commands.training_record import with_policy
from distillspec.commands.training_report import TrainingReport
from distillspec.commands.unseen import known_before
from distillspec.commands.untrained import prepare_draft, texts_of_run
from distillspec.config import TrainCommand
from distillspec.data.collect import check_responses, with_writer_logprobs
from distillspec.data.folder import DataFolder
from distillspec.data.on_policy import fresh_samples, recorded_answers
from distillspec.data.trained_prompts import with_trained_prompts
from distillspec.evaluation import TargetStates, cut_share
from distillspec.files import read_object, write_json
from distillspec.losses import LossMix
from distillspec.models import LanguageModel, check_draft, load_draft, load_target, save_draft
from distillspec.models.checkpoint import SERVED
from distillspec.models.memory import moved_off_device
from distillspec.models.target_copy import TargetCopy
from distillspec.progress import progress
from distillspec.training.checkpoint import has_checkpoint
from distillspec.training.feed import SampleFeed
from distillspec.training.interrupts import listen_for_stop
from distillspec.training.joint import JointModule
from distillspec.training.launch import check_launcher, launch, record_holdings
from distillspec.training.learning_curve import LearningCurve, alphas_compare
from distillspec.training.module import DistillModule
from distillspec.training.optimizer import choose_trainable
from distillspec.training.precision import with_settled_dtype
from distillspec.training.processes import from_main
from distillspec.training.state_store import StateStore, state_room
from distillspec.training.strategies import make_accelerator, make_strategy
from distillspec.training.tracking import Tracker, last_values
from distillspec.training.trainer import TARGET, RunHooks, RunModels, Trainer, TrainResult
from distillspec.training.unrolling import Unrolling
from distillspec.training.verdict import nothing_learned
from distillspec.types import Sample


def run(config: TrainCommand, folder: Path) -> None:
    """Train a draft into `folder`. A resumed run skips the stages that are done.

    Writes `data/`, `initial/`, `before.json`, `checkpoints/`, `metrics.jsonl`, `best/`, `draft/` and `summary.json`,
    with `draft.train_target` also `target/`.

    Raises:
        ConfigError: the settings do not go together, or not with the target or the data.
        Interrupted: a signal came. The state is saved.
    """
    check_launcher(config.launcher, config.target.device)
    mix = LossMix.parse(config.loss.terms)  # before the weights load: a mistake in the mix fails at once
    check_plan(mix, config.data)
    check_confidence(mix, config.draft)
    torch.manual_seed(config.seed)
    config = with_settled_dtype(config, folder)
    check_same_run(config, folder)
    open_run(folder, config)
    target = load_target(config.target)
    check_draft(config.draft, target)
    check_reference(config.loss.reference)
    data, samples, held_out = prepare(config, folder, target, trains=config.launcher.kind == "local")
    check_samples(mix, samples)
    evaluator = HeldOutEvaluator(config, held_out, TargetStates(target, data.states))
    before = _measure_untrained(config, evaluator, data, samples, folder)
    warn_of_noise(config.data, before["alpha"]["mean"])
    if config.launcher.kind == "local":
        result = train(config, folder, target, data, samples, held_out, evaluator)
    else:
        result = _train_in_ranks(config, folder, target)
    new = open_new_target(config, folder, data, evaluator) if config.draft.train_target else None
    if new is not None:
        target, evaluator = new.target, new.evaluator
    best = load_draft(folder / "best", target)
    with progress("measuring the trained draft"):
        after = evaluator.whole(best)
    figures = {"training": result.best, "evaluation": after.to_json()}
    save_draft(best, folder / "draft", target, figures, dtype=SERVED)
    last = last_values(folder)
    problem = nothing_learned(config, before["alpha"]["mean"], after.alpha.mean, last, result.progress.tokens)
    apart = evaluator.selection_prompts if len(held_out) > 1 else None
    curve = None
    if problem is None and alphas_compare(config):
        curve = LearningCurve.of(folder, sum(len(s.response_ids) for s in samples))
    text = {
        "selection_prompts": apart,
        "training_answers_cut": cut_share(samples),
        "nothing_learned": problem,
        "learning_curve": None if curve is None else curve.to_json(),
        **({} if new is None else new.to_json()),
    }
    close_run(folder, "train", {**summary(result, before, after, folder), **text})
    print_gain(before, after)
    for line in filter(None, [problem, new and new.line, curve and curve.line()]):
        print(line)


def prepare(
    config: TrainCommand, folder: Path, target: LanguageModel, *, trains: bool = True
) -> tuple[DataFolder, list[Sample], list[Sample]]:
    """Return the data folder, the training samples (none for an on-policy run) and the held-out answers, made once.

    Args:
        trains: this process does. Otherwise it holds none of the recorded states: those of the ranks fill the memory.
    """
    trained = known_before(config.draft)
    data = prepare_folder(config.data, target, folder / "data", config.seed, trained)
    if config.resume is None and "data.signal" in typed_settings(folder):
        check_recorded(config.data, data)
    # An on-policy run takes prompts and held-out answers from a cache, and its samples from the draft.
    recorded, room = recording(config, target), state_room(config.train.feature_gib, config.launcher.num_processes)
    room = room if recorded.state_ids and trains else 0
    on_policy = config.data.on_policy
    samples = [] if on_policy else prepare_samples(recorded, target, data, config.seed, state_bytes=room)
    return data, samples, prepare_held_out(config.data, config.sampling.policy, target, data, config.seed, trained)


def _train_in_ranks(config: TrainCommand, folder: Path, target: LanguageModel) -> TrainResult:
    """Train in the processes of `launcher=`. Each reads the prepared folder and calls `train`."""
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
    evaluator: HeldOutEvaluator | None = None,
) -> TrainResult:
    """Train from `folder/initial`, or from a checkpoint, and write the best draft to `folder/best`."""
    evaluator = evaluator or HeldOutEvaluator(config, held_out, TargetStates(target, data.states))
    used = [*(p.token_ids for p in data.read_prompts().train), *(sample.prompt_ids for sample in evaluator.choosing)]
    draft = with_policy(with_trained_prompts(load_draft(folder / "initial", target), used), config, data)
    accelerator = make_accelerator(config, draft.head.weight.shape[1])
    choose_trainable(draft, config.draft.train_embeddings)
    target_copy = TargetCopy(target, str(folder / TARGET)) if config.draft.train_target else None
    module = _make_module(config, draft, target_copy).to(accelerator.device)
    strategy = make_strategy(config, accelerator, module)
    feed = _make_feed(config, module, target, samples, accelerator)
    refresh = _make_refresh(config, module, target, data, accelerator) if config.data.on_policy else None
    untrained = read_object(folder / BEFORE)
    resuming = config.resume is not None and has_checkpoint(folder / "checkpoints")
    with listen_for_stop() as stop, progress("training") as line:
        tracker = Tracker(accelerator, config.tracker, folder)
        reference = load_draft(config.loss.reference, target) if config.loss.reference else None
        evaluate = evaluator.quick if target_copy is None else quick_with(target_copy, evaluator)
        reporter = TrainingReport(line, config, untrained.get("selection_alpha", 0.0))
        trainer = Trainer(
            RunModels(draft, target, reference, target_copy),
            module,
            strategy,
            feed,
            config,
            folder,
            tracker,
            RunHooks(evaluate, refresh, reporter),
            stop=stop,
            evaluation_s=untrained.get("evaluation_s", 0.0),
        )
        if resuming:
            for problem in trainer.resume():
                print(f"skipped a damaged checkpoint: {problem}")
            reporter.best = trainer.best["alpha"] if trainer.best else 0.0
        tracker.rewind(trainer.progress.step)  # to 0 where a run was killed before its first checkpoint
        if accelerator.is_main_process:
            tracker.start(config.tracker, folder, plain(config))
        try:
            result = trainer.run()
            if config.launcher.kind != "local":
                record_holdings(folder, strategy)
            return result
        finally:
            tracker.close()


def _make_module(config: TrainCommand, draft: LanguageModel, target_copy: TargetCopy | None) -> DistillModule:
    """Return the module of the draft and its loss, with the target's copy if it trains too."""
    if target_copy is not None:
        return JointModule(draft, target_copy.trained, config.loss, config.train)
    return DistillModule(draft, config.loss, Unrolling.of(config.train, draft.state_input))


def _make_feed(
    config: TrainCommand, module: DistillModule, target: LanguageModel, samples: list[Sample], accelerator: Accelerator
) -> SampleFeed:
    """Return this process's feed. An on-policy run's samples come at its first step."""
    return SampleFeed(
        samples,
        config.train,
        target.text_tokenizer.eos_token_id or 0,  # of padding, which nothing reads
        config.seed,
        accelerator.process_index,
        accelerator.num_processes,
        keep=refreshes_kept(module.mix, config.data),
        states=None if config.draft.train_target else _make_state_store(config, module.draft, target, samples),
    )


def _make_state_store(
    config: TrainCommand, draft: LanguageModel, target: LanguageModel, samples: Sequence[Sample]
) -> StateStore | None:
    """Return the store of the states that the draft reads, None for a draft that reads tokens alone."""
    if not draft.state_ids:
        return None
    settings, processes = config.train, config.launcher.num_processes
    held = sum(0 if sample.states is None else sample.states.nbytes for sample in samples)
    store = StateStore(target, draft.state_ids, settings.feature_gib, config.data.state_precision, processes, held)
    print(store.describe(samples))
    return store


def _make_refresh(
    config: TrainCommand, module: DistillModule, target: LanguageModel, data: DataFolder, accelerator: Accelerator
) -> Callable[[LanguageModel, int], list[Sample]]:
    """Return the function that samples on-policy text from the draft at a step, in the main process for all.

    Raises:
        ConfigError: the file is to answer prompts, and has no response to any.
    """
    prompts, recorded = data.read_prompts().train, recorded_answers(config.data, target, data)
    check_responses(config.data, prompts)

    def sample(model: LanguageModel, step: int) -> list[Sample]:
        samples = fresh_samples(config.data, target, model, prompts, config.seed, step, recorded)
        needed = module.mix.needs_draft_samples
        return with_writer_logprobs(samples, model, config.data.policy, target) if needed else samples

    return lambda model, step: from_main(accelerator, lambda: sample(model, step))


def _measure_untrained(
    config: TrainCommand, evaluator: HeldOutEvaluator, data: DataFolder, samples: list[Sample], folder: Path
) -> dict[str, Any]:
    """Write the untrained draft to `folder/initial` and return its figures, measured once a run."""
    record = folder / BEFORE
    if record.is_file() and (folder / "initial").is_dir():
        return read_object(record)
    target = evaluator.states.target
    draft = prepare_draft(config.draft, target, lambda: texts_of_run(config.data, target, data, config.seed, samples))
    if draft.stop_head is not None:
        draft = replace(draft, stop_head=None)
        print("left out what train-stop taught the draft: it is of the weights before; teach the new ones again")
    save_draft(draft, folder / "initial", target)
    with progress("measuring the untrained draft"):
        alpha = evaluator.quick(draft)["eval/alpha"]  # the target reads these answers here only
        seconds = _evaluation_seconds(evaluator, draft) if config.train.max_minutes is not None else 0.0
        result = evaluator.untrained(draft).to_json()
    before = {**result, "selection_alpha": alpha, "evaluation_s": seconds}
    write_json(record, before)
    return before


def _evaluation_seconds(evaluator: HeldOutEvaluator, draft: LanguageModel) -> float:
    """Return the seconds of an evaluation during training, when the target has read the answers."""
    started = time.perf_counter()
    evaluator.quick(draft)
    return time.perf_counter() - started
