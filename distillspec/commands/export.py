"""`distill export`: a draft folder for other engines, checked by loading it again."""

from __future__ import annotations

from pathlib import Path

from distillspec.commands.drafts import find_draft
from distillspec.commands.run_folder import close_run, open_run
from distillspec.config import ExportCommand
from distillspec.export import export_draft
from distillspec.models import load_target


def run(config: ExportCommand, folder: Path) -> None:
    """Write `folder/export` and print the command that serves it."""
    draft = find_draft(str(config.draft.path))
    target = load_target(config.target)
    open_run(folder, config)
    result = export_draft(
        draft,
        folder / "export",
        config.format,
        target,
        dtype=config.dtype,
        speculation_length=config.speculation_length,
    )
    print("\n".join(result.lines()))
    close_run(folder, "export", result.to_json())
