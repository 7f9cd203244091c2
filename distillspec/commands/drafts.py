"""Finished drafts by path, as commands take them."""

from __future__ import annotations

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
