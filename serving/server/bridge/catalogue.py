"""Drafts by name, for operators: those of a folder, or the versions of online adaptation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distillspec.errors import ConfigError, RunError
from distillspec.models.checkpoint import METADATA
from distillspec.serving.engine import Engine

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")
ONE_DRAFT = "this server has one draft; start it with drafts=[…] to load and unload several"


@dataclass(frozen=True)
class DraftEntry:
    """A draft that can be loaded. `version` is None until it was loaded once."""

    name: str
    version: str | None
    current: bool
    status: str | None = None  # the registry's: candidate, promoted, inconclusive, refused, retired, rolled_back
    draft: str | None = None  # of several drafts that learn: the one that it is a version of


class DraftCatalogue(Protocol):
    """Drafts by name. Methods may take seconds. They are called in another thread, one at a time."""

    def list(self) -> tuple[DraftEntry, ...]: ...

    def load(self, name: str) -> str:
        """Use this draft from the next step on. Return its version. On ConfigError the current draft stays."""
        ...

    def promote(self, name: str) -> str:
        """Make this the draft of restarts and other servers too. Return its version. May raise NotOffered."""
        ...

    def rollback(self, draft: str | None = None) -> str:
        """Go back to the previous draft, or to that of one of several. Return its version."""
        ...

    def unload(self, name: str) -> None:
        """Drop one of several drafts from the next step on. May raise NotOffered."""
        ...


class NotInCatalogue(LookupError):
    """No draft has this name."""


class NotOffered(Exception):
    """The catalogue does not support this action."""


class FolderCatalogue:
    """The draft folders directly inside `root`. Keeps the loaded ones in order, for `rollback`.

    Raises:
        ConfigError: `root` is not a folder.
    """

    def __init__(self, engine: Engine, root: str | Path, started_with: Path | None) -> None:
        self.engine, self.root = engine, folder_of(root)
        self._history = [] if started_with is None else [started_with.resolve()]
        self._versions: dict[Path, str] = {}
        if started_with is not None and engine.draft is not None:
            self._versions[started_with.resolve()] = engine.draft.identity.version

    def list(self) -> tuple[DraftEntry, ...]:
        folders = drafts_in(self.root)
        current = self._history[-1] if self._history else None
        return tuple(DraftEntry(f.name, self._versions.get(f.resolve()), f.resolve() == current) for f in folders)

    def load(self, name: str) -> str:
        folder = self._find(name)
        version = self._swap(folder)
        if self._history[-1:] != [folder]:  # a repeated request is no further draft to go back to
            self._history.append(folder)
        return version

    def promote(self, name: str) -> str:
        raise NotOffered("a folder of drafts keeps no record that a restart reads; start with online=on")

    def rollback(self, draft: str | None = None) -> str:
        if draft is not None:
            raise NotOffered(ONE_DRAFT)
        if len(self._history) < 2:
            raise NotInCatalogue("no draft was used before this one")
        version = self._swap(self._history[-2])
        self._history.pop()
        return version

    def unload(self, name: str) -> None:
        raise NotOffered(ONE_DRAFT)

    def _swap(self, folder: Path) -> str:
        self._versions[folder] = version = self.engine.load_draft(folder)
        return version

    def _find(self, name: str) -> Path:
        folder = draft_in(self.root, name)
        if folder is None:
            raise not_there(name)
        return folder


class PoolCatalogue:
    """The drafts of an engine that has several: those it was started with, and those of a folder.

    Args:
        paths: those it was started with, by name.
        root: a folder of further ones, None: no more.
    """

    def __init__(self, engine: Engine, paths: Mapping[str, Path], root: str | None) -> None:
        self.engine, self._paths = engine, dict(paths)
        self._root = None if root is None else folder_of(root)

    def list(self) -> tuple[DraftEntry, ...]:
        loaded = dict(self.engine.drafts)  # the engine's thread changes it
        further = [] if self._root is None else [folder.name for folder in drafts_in(self._root)]
        versions = {name: draft.identity.version for name, draft in loaded.items()}
        return tuple(
            [DraftEntry(name, versions.get(name), name in loaded) for name in dict.fromkeys([*self._paths, *further])]
        )

    def load(self, name: str) -> str:
        """Load a draft beside the others, or again in its own place. The folder's comes before one of the start."""
        path = (None if self._root is None else draft_in(self._root, name)) or self._paths.get(name)
        if path is None:
            raise not_there(name)
        version = self.engine.load_draft(path, name=name)
        self._paths[name] = path
        return version

    def unload(self, name: str) -> None:
        if name not in self.engine.drafts:
            raise not_there(name)
        self.engine.unload_draft(name)

    def promote(self, name: str) -> str:
        raise NotOffered("several drafts keep no record that a restart reads; start with drafts=[…]")

    def rollback(self, draft: str | None = None) -> str:
        raise NotOffered("several drafts have no order to go back in; load and unload them by name")


def drafts_in(root: Path) -> list[Path]:
    """Return the draft folders directly inside a folder.

    Raises:
        RunError: it cannot be read.
    """
    try:
        return sorted(folder for folder in root.iterdir() if draft_in(root, folder.name) is not None)
    except OSError as error:
        raise RunError(f"server.drafts_folder={root} cannot be read: {error.strerror}") from error


def draft_in(root: Path, name: str) -> Path | None:
    """Return a draft's folder, None if there is none.

    A name is never a path: no separator, no leading dot, no link out of `root`.
    """
    if not NAME.fullmatch(name):
        return None
    folder = (root / name).resolve()
    return folder if folder.parent == root and (folder / METADATA).is_file() else None


def not_there(name: str) -> NotInCatalogue:
    """Return the error for a name without a draft."""
    return NotInCatalogue(f"there is no draft {name!r}; see GET /admin/drafts")


def folder_of(root: str | Path) -> Path:
    """Return the folder of drafts. Raise ConfigError if it is not one."""
    if not Path(root).is_dir():
        raise ConfigError(f"server.drafts_folder={root} is not a folder")
    return Path(root).resolve()
