"""`distill generate`: a data folder for `distill train data.cache=FOLDER`."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from distillspec.commands.drafts import find_draft
from distillspec.commands.held_out import prepare_held_out
from distillspec.commands.prompt_folder import prepare_folder
from distillspec.commands.run_folder import close_run, open_run
from distillspec.commands.samples import prepare_samples
from distillspec.config import GenerateCommand
from distillspec.models import load_draft, load_target


def run(config: GenerateCommand, folder: Path) -> None:
    """Write prompts, held-out answers and training samples to `folder/data`. A resumed run goes on where it stopped."""
    needs_draft = config.data.on_policy
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    draft = load_draft(find_draft(str(config.draft.path)), target) if needs_draft else None
    open_run(folder, config)
    started = time.monotonic()
    data = prepare_folder(config.data, target, folder / "data", config.seed)
    prepare_held_out(config.data, config.sampling.policy, target, data, config.seed)
    samples = prepare_samples(config.data, target, data, config.seed, draft=draft)
    tokens = sum(len(s.response_ids) for s in samples)
    print(f"{len(samples)} responses, {tokens} tokens; train on them with: distill train data.cache={folder}")
    close_run(
        folder,
        "generate",
        {
            "samples": len(samples),
            "response_tokens": tokens,
            "seconds": time.monotonic() - started,
            "finished_share": sum(s.finished for s in samples) / max(1, len(samples)),
            "data": str(data.root),
        },
    )
