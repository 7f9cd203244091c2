"""`distill eval`: several drafts in one table and one picture."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from distillspec.commands.own_runs import data_of, find_runs
from distillspec.commands.prepare import prepare_folder, prepare_held_out
from distillspec.commands.run_folder import close_run, open_run
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
from distillspec.models import LanguageModel, load_draft, load_target
from distillspec.models.checkpoint import METADATA
from distillspec.progress import progress
from distillspec.types import Sample


def run(config: EvalCommand, folder: Path) -> None:
    """Writes `summary.json`, `table.txt` and `comparison.png`."""
    paths = [find_draft(path) for path in config.drafts]
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    drafts = [load_draft(path, target) for path in paths]
    open_run(folder, config)
    held_out, states = _held_out(config, target, paths, folder)
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
    config: EvalCommand, target: LanguageModel, paths: list[Path], folder: Path
) -> tuple[list[Sample], TargetStates]:
    """The target's answers to prompts that no draft was trained on or chosen by, as far as their runs are here."""
    runs = find_runs(paths, target)
    # One prompt to train on, as no split has none: an evaluation needs held-out prompts alone.
    asked = replace(data_of(config.data, runs), num_prompts=1)
    data = prepare_folder(asked, target, folder / "data", config.seed)
    used = frozenset[tuple[int, ...]]().union(*(run.used for run in runs))
    held_out = prepare_held_out(asked, config.sampling.policy, target, data, config.seed, used)
    if not held_out:
        raise ConfigError(
            f"every held-out prompt of {data.root} was used to train or choose one of the drafts; "
            "name others with data.prompts=FILE or data.cache=RUN"
        )
    left_out = sum(prompt.token_ids in used for prompt in data.read_prompts().held_out)
    print(
        f"judged on {len(held_out)} held-out prompts of {data.root}"
        + (f"; {left_out} were left out, which drafts were trained on or chosen by" if left_out else "")
    )
    return held_out, TargetStates(target, data.states)


def find_draft(path: str) -> Path:
    """A draft folder, or the draft inside a run folder."""
    for folder in (Path(path), Path(path) / "draft", Path(path) / "best"):
        if (folder / METADATA).is_file():
            return folder
    raise ConfigError(f"{path} is not a draft: neither it nor {path}/draft has {METADATA}; make one with distill train")


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
