"""Finished drafts by path, as commands take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from distillspec.errors import ConfigError
from distillspec.models.checkpoint import METADATA, draft_folder


def find_draft(path: str) -> Path:
    """Return the draft folder at `path`, or the draft inside the run folder `path`.

    Raises:
        ConfigError: there is none.
    """
    if (folder := draft_folder(path)) is not None:
        return folder
    raise ConfigError(
        f"{path} is not a draft: {METADATA} is not in it, {path}/draft or {path}/best; make one with distill train"
    )


def find_drafts(paths: Sequence[str]) -> list[Path]:
    """Return the draft folders at `paths`, in their order.

    Raises:
        ConfigError: one of them is no draft, or two are the same.
    """
    found: dict[Path, Path] = {}
    for path in paths:
        folder = find_draft(path)
        if (same := found.get(folder.resolve())) is not None:
            raise ConfigError(f"drafts= names {same} twice (again as {path}); name each draft once")
        found[folder.resolve()] = folder
    return list(found.values())
