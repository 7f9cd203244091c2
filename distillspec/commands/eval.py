"""`distill eval`: several drafts in one table and one picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distillspec.commands.own_runs import data_of, find_runs, typed_settings
from distillspec.commands.prepare import prepare_folder, prepare_held_out
from distillspec.commands.run_folder import close_run, open_run
from distillspec.commands.unseen import trained_prompts
from distillspec.config import EvalCommand
from distillspec.errors import ConfigError
from distillspec.evaluation import (
    EvaluationResult,
    TargetStates,
    compare_pairs,
    comparison_text,
    evaluate,
    plot_comparison,
)
from distillspec.files import write_text
from distillspec.models import LanguageModel, load_draft, load_target, read_metadata
from distillspec.models.checkpoint import METADATA, draft_folder
from distillspec.progress import progress
from distillspec.types import Sample


def run(config: EvalCommand, folder: Path) -> None:
    """Writes `summary.json`, `table.txt` and `comparison.png`."""
    paths = [find_draft(path) for path in config.drafts]
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    drafts = [load_draft(path, target) for path in paths]
    open_run(folder, config)
    held_out, states = _held_out(config, target, paths, drafts, folder)
    results = [_judge(draft, states, held_out, config) for draft in drafts]
    states.save()
    pairs = compare_pairs(results, config.evaluation.bootstrap_samples, config.seed)
    text = comparison_text(results, pairs)
    print(text)
    write_text(folder / "table.txt", text + "\n")
    plot_comparison(results, folder / "comparison.png")
    summary = {"results": [result.to_json() for result in results], "pairs": [pair.to_json() for pair in pairs]}
    close_run(folder, "eval", summary)


def _held_out(
    config: EvalCommand, target: LanguageModel, paths: list[Path], drafts: list[LanguageModel], folder: Path
) -> tuple[list[Sample], TargetStates]:
    """The target's answers to prompts that no draft was trained on or chosen by, as far as the drafts say."""
    _tell_unknown(paths)
    trained = frozenset[str]().union(*(trained_prompts(draft.lineage) for draft in drafts))
    # A split must train on at least one prompt; an evaluation needs only the held-out ones.
    asked = replace(data_of(config.data, find_runs(paths, target), typed_settings(folder)), num_prompts=1)
    data = prepare_folder(asked, target, folder / "data", config.seed, trained)
    held_out = prepare_held_out(asked, config.sampling.policy, target, data, config.seed, trained)
    print(f"judged on {len(held_out)} held-out prompts of {data.root}")
    return held_out, TargetStates(target, data.states)


def find_draft(path: str) -> Path:
    """A draft folder, or the draft inside a run folder."""
    if (folder := draft_folder(path)) is not None:
        return folder
    raise ConfigError(
        f"{path} is not a draft: {METADATA} is not in it, {path}/draft or {path}/best; make one with distill train"
    )


def _tell_unknown(paths: list[Path]) -> None:
    """Name the trained drafts of earlier versions, which do not say what they were trained on."""
    for path in paths:
        record = read_metadata(path)
        if "training" in record and not trained_prompts(record.get("lineage", {})):
            print(f"{path} does not say which prompts it was trained on; it may be judged on some of them")


def _judge(draft: LanguageModel, states: TargetStates, held_out: list[Sample], config: EvalCommand) -> EvaluationResult:
    with progress(f"judging {draft.name}") as line:
        return evaluate(
            draft,
            states.target,
            held_out,
            config.sampling.policy,
            config.evaluation,
            seed=config.seed,
            states=states,
            on_sample=lambda done, total: line.update(done / total, f"{done} of {total} prompts"),
        )
