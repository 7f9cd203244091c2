"""Shard files of the replay log, kept in step with its manifest."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distillspec.data.shard_file import ShardRefused, has_size
from distillspec.files import sha256_of
from distillspec.serving.online.log.manifest import Manifest
from distillspec.serving.online.log.records import LoggedAnswer, LogKey
from distillspec.serving.online.log.shard import load_shard, save_shard

log = logging.getLogger(__name__)


class ShardFiles:
    """Writes, reads and removes the shard files of a log.

    A file is written before the manifest lists it, and leaves the manifest before it is removed. A crash in between
    leaves a stray file, never a listed answer without its bytes.

    Args:
        write: makes a file: `(path, write_to(temporary))`. Tests of full disks replace it.
    """

    def __init__(self, manifest: Manifest, key: LogKey, write: Callable[[Path, Callable[[Path], Any]], None]) -> None:
        self.manifest = manifest
        self.folder = manifest.folder
        self.key = key
        self.write = write
        self.refused: dict[str, str] = {}  # file → why its answers are not read

    def add(self, answers: Sequence[LoggedAnswer]) -> None:
        """Write one shard and list it.

        Raises:
            RunError: the disk is full. Nothing was kept.
        """
        path = self._save(answers)
        with _removed_on_error(path):
            self.manifest.enter(path.name, sha256_of(path), path.stat().st_size, answers)

    def load(self, shard: int) -> list[LoggedAnswer]:
        """Return all answers in a shard's file. Empty if the shard is gone, damaged, foreign or too new."""
        row = self.manifest.shard(shard)
        if row is None:
            return []
        path = self.folder / row.file
        try:
            return load_shard(path, self.key, row.sha256)
        except (ShardRefused, FileNotFoundError) as problem:
            if path.is_file():  # else retention or a rewrite removed it while it was read
                self._refuse(row.file, str(problem))
            return []

    def listed(self, shard: int) -> dict[int, LoggedAnswer]:
        """Return number → answer, of the listed answers.

        A deletion between the two reads can shift places. The caller compares each answer with its entry.
        """
        answers = self.load(shard)
        return {number: answers[i] for number, i in self.manifest.places(shard).items() if i < len(answers)}

    def rewrite(self, shard: int) -> None:
        """Replace a shard's file by one with its listed answers only. Their numbers stay."""
        row = self.manifest.shard(shard)
        places = list(self.manifest.places(shard).values())
        answers = self.load(shard)
        kept = [place for place in places if place < len(answers)]
        if row is None or not kept:
            self.remove([shard])
            return
        path = self._save([answers[place] for place in kept])
        with _removed_on_error(path):
            self.manifest.replace(shard, path.name, sha256_of(path), path.stat().st_size, kept)
        (self.folder / row.file).unlink(missing_ok=True)

    def remove(self, shards: Sequence[int]) -> None:
        """Remove shards from the manifest, then their files."""
        if not shards:
            return
        for file in self.manifest.remove(shards):
            (self.folder / file).unlink(missing_ok=True)

    def remove_damaged(self) -> None:
        """Remove shards whose file is missing or has another size, and count them."""
        rows = self.manifest.shards()
        damaged = [row.id for row in rows if not has_size(self.folder / row.file, row.bytes)]
        self.remove(damaged)
        self.manifest.add("damaged_shards", len(damaged))

    def sweep(self) -> None:
        """Remove files that the manifest does not list, and count them."""
        known = {row.file for row in self.manifest.shards()}
        strays = [path for path in self.folder.glob("*shard-*") if path.name not in known]
        for path in strays:
            path.unlink(missing_ok=True)
        self.manifest.add("stray_files", len(strays))

    def _save(self, answers: Sequence[LoggedAnswer]) -> Path:
        path = self.folder / f"shard-{uuid.uuid4().hex}.safetensors"
        self.write(path, lambda temporary: save_shard(temporary, answers, self.key))
        return path

    def _refuse(self, file: str, reason: str) -> None:
        """Log a refused file once, and count it once for all processes."""
        if file in self.refused:
            return
        log.warning("a shard of the log is skipped: %s", reason)
        self.refused[file] = reason
        self.manifest.add_refusal(file, reason)


@contextmanager
def _removed_on_error(path: Path) -> Iterator[None]:
    """Remove a new file if listing it fails."""
    try:
        yield
    except BaseException:
        path.unlink(missing_ok=True)
        raise
