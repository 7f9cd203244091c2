"""`distill init-draft`: an untrained draft."""

from __future__ import annotations

from pathlib import Path

import torch

from distillspec.commands.prompt_folder import check_sources, prepare_folder
from distillspec.commands.run_folder import close_run, open_run
from distillspec.commands.untrained import prepare_draft, target_texts
from distillspec.config import InitDraftCommand
from distillspec.data.trained_prompts import TRAINED
from distillspec.models import LanguageModel, check_draft, load_target, save_draft
from distillspec.models.checkpoint import SERVED
from distillspec.types import Sample


def run(config: InitDraftCommand, folder: Path) -> None:
    """Write the draft to `folder/draft`. Sample text only where something is chosen by it (`prepare_draft`)."""
    check_sources(config.data)
    torch.manual_seed(config.seed)
    target = load_target(config.target)
    check_draft(config.draft, target)
    open_run(folder, config)
    draft = prepare_draft(config.draft, target, lambda: read_texts(config, target, folder / "data"))
    save_draft(draft, folder / "draft", target, dtype=SERVED)
    parameters = sum(p.numel() for p in draft.model.parameters())
    print(
        f"untrained draft: {parameters / 1e6:.1f} M parameters, {len(draft.layers)} layers, {draft.width} output tokens"
    )
    lineage = {name: value for name, value in draft.lineage.items() if name != TRAINED}
    close_run(
        folder,
        "init-draft",
        {"draft": str(folder / "draft"), "parameters": parameters, "lineage": lineage, "width": draft.width},
    )


def read_texts(config: InitDraftCommand, target: LanguageModel, own: Path) -> list[Sample]:
    """Return the cache's samples, or the target's answers to a few training prompts."""
    data = prepare_folder(config.data, target, own, config.seed)
    return target_texts(config.data, target, data, config.seed)
