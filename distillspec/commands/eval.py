"""`distill eval`: several drafts in one table and one picture."""

from __future__ import annotations

from pathlib import Path

import torch

from distillspec.commands.prepare import prepare_folder, prepare_held_out
from distillspec.commands.run_folder import close_run, open_run
from distillspec.commands.unseen import trained_prompts
from distillspec.config import EvalCommand
from distillspec.errors import ConfigError
from distillspec.evaluation import EvaluationResult, TargetStates, comparison_text, evaluate, plot_comparison
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
    trained = frozenset[str]().union(*(trained_prompts(draft.lineage) for draft in drafts))
    _tell_unknown(paths)
    data = prepare_folder(config.data, target, folder / "data", config.seed, trained)
    held_out = prepare_held_out(config.data, config.sampling.policy, target, data, config.seed, trained)
    states = TargetStates(target, data.states)
    results = [_judge(draft, states, held_out, config) for draft in drafts]
    states.save()
    text = comparison_text(results)
    print(text)
    write_text(folder / "table.txt", text + "\n")
    plot_comparison(results, folder / "comparison.png")
    close_run(folder, "eval", {"results": [result.to_json() for result in results]})


def find_draft(path: str) -> Path:
    """A draft folder, or the draft inside a run folder."""
    if (folder := draft_folder(path)) is not None:
        return folder
    raise ConfigError(f"{path} is not a draft: neither it nor {path}/draft has {METADATA}; make one with distill train")


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
