"""`distill eval`: drafts compared in a table and a plot."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distillspec.commands.drafts import find_drafts
from distillspec.commands.held_out import prepare_held_out
from distillspec.commands.own_runs import data_of, find_runs, typed_settings
from distillspec.commands.prompt_folder import prepare_folder
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import EvalCommand
from distillspec.data.trained_prompts import trained_prompts
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
from distillspec.models.checkpoint import check_target
from distillspec.progress import progress
from distillspec.types import Sample


def run(config: EvalCommand, folder: Path) -> None:
    """Write `summary.json`, `table.txt` and `comparison.png`."""
    paths = find_drafts(config.drafts)
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    for path in paths:
        check_target(path, target)
    drafts = [load_draft(path, target) for path in paths]
    open_run(folder, config)
    held_out, states = _held_out(config, target, paths, drafts, folder)
    results = [_evaluate(draft, states, held_out, config) for draft in drafts]
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
    """Return the target's answers to prompts that, by their records, no draft was trained on or chosen by."""
    _warn_of_unrecorded(paths)
    trained = frozenset[str]().union(*(trained_prompts(draft.lineage) for draft in drafts))
    # One training prompt, the least that a split takes: an evaluation reads only held-out ones.
    data_config = replace(data_of(config.data, find_runs(paths), typed_settings(folder)), num_prompts=1)
    data = prepare_folder(data_config, target, folder / "data", config.seed, trained)
    held_out = prepare_held_out(data_config, config.sampling.policy, target, data, config.seed, trained)
    print(f"judged on {len(held_out)} held-out prompts of {data.root}")
    return held_out, TargetStates(target, data.states)


def _warn_of_unrecorded(paths: list[Path]) -> None:
    """Warn of trained drafts that do not record their prompts: those of early versions."""
    for path in paths:
        record = read_metadata(path)
        if "training" in record and not trained_prompts(record.get("lineage", {})):
            print(f"{path} does not record its training prompts; it may be evaluated on some of them")


def _evaluate(
    draft: LanguageModel, states: TargetStates, held_out: list[Sample], config: EvalCommand
) -> EvaluationResult:
    with progress(f"evaluating {draft.name}") as line:
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
