"""Drafts by name, for operators: those of a folder, or the versions of online adaptation."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from distillspec.errors import ConfigError
from distillspec.models.checkpoint import METADATA
from distillspec.serving.engine import Engine

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,199}")


@dataclass(frozen=True)
class DraftEntry:
    """A draft that can be loaded. `version` is None until it was loaded once."""

    name: str
    version: str | None
    current: bool
    status: str | None = None  # the registry's: candidate, promoted, inconclusive, refused, retired, rolled_back


class DraftCatalogue(Protocol):
    """Drafts by name. Methods may take seconds. They are called in another thread, one at a time."""

    def list(self) -> tuple[DraftEntry, ...]: ...

    def load(self, name: str) -> str:
        """Use this draft from the next step on. Return its version. On ConfigError the current draft stays."""
        ...

    def promote(self, name: str) -> str:
        """Make this the draft of restarts and other servers too. Return its version. May raise NotOffered."""
        ...

    def rollback(self) -> str:
        """Go back to the previous draft. Return its version."""
        ...


class NotInCatalogue(LookupError):
    """No draft has this name."""


class NotOffered(Exception):
    """The catalogue does not support this action."""


class FolderCatalogue:
    """The draft folders directly inside `root`. Keeps the loaded ones in order, for `rollback`."""

    def __init__(self, engine: Engine, root: Path, started_with: Path | None) -> None:
        self.engine, self.root = engine, root.resolve()
        self._history = [] if started_with is None else [started_with.resolve()]
        self._versions: dict[Path, str] = {}
        if started_with is not None and engine.draft is not None:
            self._versions[started_with.resolve()] = engine.draft.identity.version

    def list(self) -> tuple[DraftEntry, ...]:
        found = sorted(folder for folder in self.root.iterdir() if self._is_draft(folder))
        current = self._history[-1] if self._history else None
        return tuple(DraftEntry(f.name, self._versions.get(f.resolve()), f.resolve() == current) for f in found)

    def load(self, name: str) -> str:
        folder = self._find(name)
        version = self._swap(folder)
        self._history.append(folder)
        return version

    def promote(self, name: str) -> str:
        raise NotOffered("a folder of drafts keeps no record that a restart reads; start with online=on")

    def rollback(self) -> str:
        if len(self._history) < 2:
            raise NotInCatalogue("no draft was used before this one")
        version = self._swap(self._history[-2])
        self._history.pop()
        return version

    def _swap(self, folder: Path) -> str:
        self._versions[folder] = version = self.engine.load_draft(folder)
        return version

    def _find(self, name: str) -> Path:
        """Return a draft's folder. A name is never a path: no separator, no leading dot, no link out of `root`."""
        if not NAME.fullmatch(name):
            raise NotInCatalogue(f"{name!r} is not a draft's name; see GET /admin/drafts")
        folder = self.root / name
        if not self._is_draft(folder):
            raise NotInCatalogue(f"there is no draft {name!r}; see GET /admin/drafts")
        return folder.resolve()

    def _is_draft(self, folder: Path) -> bool:
        inside = folder.resolve().parent == self.root
        return inside and bool(NAME.fullmatch(folder.name)) and (folder / METADATA).is_file()


def open_folder(engine: Engine, root: str, started_with: Path | None) -> FolderCatalogue:
    """Return the catalogue of the folder `root`. Raise ConfigError if it is not a folder."""
    if not Path(root).is_dir():
        raise ConfigError(f"server.drafts_folder={root} is not a folder")
    return FolderCatalogue(engine, Path(root), started_with)
