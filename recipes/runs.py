"""Runs of `distill` that a study makes: whether one is finished, and how an interrupted one goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distillspec.files import read_object


def summary_of(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run, None for others."""
    return read_object(folder / "summary.json") or None


def resumable(command: list[str], folder: Path) -> list[str]:
    """Return the command, or its continuation if an earlier one was interrupted."""
    if (folder / ".hydra" / "overrides.yaml").is_file():
        return [command[0], f"resume={folder}"]
    return command
