"""Exports of the replay log: files elsewhere, which a tenant's deletion reaches where they were written."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from distillspec.data.shard_file import ShardRefused
from distillspec.files import clear_disk_errors
from distillspec.serving.online.log.manifest import Manifest
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.shard import load_shard, save_shard

log = logging.getLogger(__name__)


class Exports:
    """Writes exports, and takes deleted tenants' answers out of them. The manifest lists which export has whose text.

    Args:
        write: makes a file: `(path, write_to(temporary))`.
    """

    def __init__(self, manifest: Manifest, key: LogKey, write: Callable[[Path, Callable[[Path], Any]], None]) -> None:
        self._manifest = manifest
        self._key = key
        self._write = write

    def add(self, path: Path, answers: Sequence[LoggedAnswer]) -> None:
        """Write answers to a file. It is listed before, so that a crash leaves none that no deletion would find."""
        self._manifest.list_export(str(path.resolve()), {answer.tenant for answer in answers})
        self._save(path, answers)

    def clean(self) -> None:
        """Take the answers of deleted tenants out of the exports that the manifest names.

        An export that is gone, or is no export any more, is logged in one line and forgotten.

        Raises:
            RunError: a file cannot be read or written. It is tried again at the next deletion or start.
        """
        for path, tenants in self._manifest.exports_to_clean().items():
            with clear_disk_errors(Path(path)):
                self._clean(Path(path), tenants)
            self._manifest.forget_deleted_in(path)

    def _clean(self, path: Path, tenants: Collection[str]) -> None:
        for part in path.parent.glob(f".{path.name}.*.tmp"):  # of a command that was killed while it wrote
            part.unlink(missing_ok=True)
        if not path.is_file():
            log.warning("the export %s was moved or removed: a copy of it still holds a deleted tenant's text", path)
            return
        try:
            answers = load_shard(path, self._key)
        except ShardRefused as problem:
            log.warning("a deleted tenant's text may be left in %s, which is no export any more: %s", path, problem)
            return
        kept = [answer for answer in answers if answer.tenant not in tenants]
        if kept:
            self._save(path, kept)
        else:
            path.unlink()

    def _save(self, path: Path, answers: Sequence[LoggedAnswer]) -> None:
        self._write(path, lambda temporary: save_shard(temporary, answers, self._key))
