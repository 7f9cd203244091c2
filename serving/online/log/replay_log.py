"""Replay log on disk: shards of logged answers, and the manifest that lists them.

A shard is written to a temporary file, synced and renamed. Then one transaction lists it with its answers. The next
start removes files that are not listed, and forgets and counts listed ones that are damaged. So a crash costs only
answers that were not acknowledged, and never brings deleted ones back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from distillspec.config import ReplayConfig
from distillspec.errors import ConfigError, RunError
from distillspec.files import write_private
from distillspec.serving.base.owner_files import EVERYBODY, delete_files
from distillspec.serving.online.log.deletions import Deletions
from distillspec.serving.online.log.exports import Exports
from distillspec.serving.online.log.manifest import DraftedText, Manifest
from distillspec.serving.online.log.records import LogEntry, LoggedAnswer, LogKey
from distillspec.serving.online.log.retention import Retention
from distillspec.serving.online.log.shard_files import ShardFiles
from distillspec.serving.online.state.layout import ANSWERS, MANIFEST
from distillspec.serving.online.state.lock import held


class SteadyClock:
    """Seconds since the epoch at the start, advanced by the monotonic clock.

    Setting the machine's clock while this runs changes nothing. A wall clock earlier than `not_before` (the newest
    record of an earlier process) starts at `not_before`.
    """

    def __init__(
        self,
        not_before: float = 0.0,
        wall: Callable[[], float] | None = None,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self._steady = steady
        self._offset = max((wall or time.time)(), not_before) - steady()

    def __call__(self) -> float:
        return self._steady() + self._offset


CHANGING = "changing.lock"  # held while files and manifest change together


class ReplayLog:
    """Log in `folder`. Several processes may read it. Writers take turns.

    Args:
        key: target whose signal the log holds. None accepts the recorded one.
        write: makes a file: `(path, write_to(temporary))`. Tests of full disks replace it.

    Raises:
        ConfigError: there is no log, or it holds another target's signal.
    """

    def __init__(
        self,
        folder: Path,
        key: LogKey | None = None,
        config: ReplayConfig | None = None,
        *,
        clock: Callable[[], float] | None = None,
        write: Callable[[Path, Callable[[Path], Any]], None] = write_private,
        seed: int = 0,
    ) -> None:
        if key is None and not (folder / MANIFEST).is_file():
            raise ConfigError(f"there is no log in {folder}; a server with online=on writes one")
        self.folder, self.config = folder, config or ReplayConfig()
        self.manifest = Manifest(folder)
        self.key = self.manifest.agree(key)
        self.clock = clock or SteadyClock(self.manifest.newest_s())
        self.files = ShardFiles(self.manifest, self.key, write)
        self._exports = Exports(self.manifest, self.key, write)
        self._deletions = Deletions(self.manifest, self.files, self._exports, self.clock)
        self._retention = Retention(self.manifest, self.files, self.config, self.clock, seed)
        self._domains: Callable[[], Sequence[str]] | None = None

    def of(self, domains: Callable[[], Sequence[str]]) -> ReplayLog:
        """Return the log as a draft of some domains learns from it: `entries` and `count` leave out all others.

        Args:
            domains: returns those of now. Closing either log closes both.
        """
        part = copy(self)
        part._domains = domains
        return part

    @property
    def refused(self) -> dict[str, str]:
        """File → why this process did not read its answers."""
        return self.files.refused

    @property
    def full(self) -> bool:
        """True when new answers replace others. Known only after this process's first write."""
        return self._retention.full

    # -- writing ------------------------------------------------------------------------------------------------

    def append(self, answers: Sequence[LoggedAnswer]) -> int:
        """Write answers to disk and return how many.

        Those recorded before their tenant's deletion, and those of tenants that are excluded by now, stay out.

        Raises:
            RunError: the disk is full. Nothing was kept.
        """
        with self._changing():
            cutoffs, excluded = self._deletions.cutoffs(), self.excluded()
            kept = [a for a in answers if a.time_s > cutoffs.get(a.tenant, float("-inf")) and a.tenant not in excluded]
            if kept:
                self.files.add(kept)
            self._retention.make_room()
        return len(kept)

    def expire(self) -> None:
        """Apply retention where nothing is appended: in a pause, or without traffic."""
        with self._changing():
            self._retention.make_room()

    def exclude_tenant(self, tenant: str, excluded: bool = True) -> None:
        """Log no answer of a tenant from now on, in any process, until this is taken back. What is logged stays.

        What proposers have on disk of the tenant alone is removed.

        Raises:
            RunError: such a file stays. The tenant is excluded.
        """
        self.manifest.exclude(tenant, excluded)
        if excluded:
            self._delete_answers(tenant)

    def excluded(self) -> set[str]:
        """Return the tenants that `exclude_tenant` keeps out."""
        return self.manifest.excluded()

    def delete_tenant(self, tenant: str) -> int:
        """Delete a tenant's answers from shards, manifest and exports, and what proposers have on disk.

        Returns how many answers were listed.

        They are off the list at once. If a crash, a full disk or a busy reader keeps their bytes in files, the next
        `reconcile` or deletion, of any tenant, removes them. The tenant's name stays in the list of deletions. Files
        are overwritten or removed. Copies that the disk or a backup keeps are not reached.

        Raises:
            RunError: bytes are left in files for now.
        """
        with self._changing():
            count = self._deletions.delete(tenant)
        self._delete_answers(tenant, EVERYBODY[0])  # in what all share they cannot be told apart
        return count

    @contextmanager
    def still_there(self, entries: Sequence[LogEntry]) -> Iterator[None]:
        """Hold deletions off while the block runs.

        Raises:
            RunError: see `check_there`.
        """
        with self._changing():
            self.check_there(entries)
            yield

    def check_there(self, entries: Sequence[LogEntry]) -> None:
        """Look whether entries are still there. Where no tenant of theirs was deleted, this takes one short query.

        Raises:
            RunError: a tenant of these entries was deleted, and some of them with it.
        """
        deleted = self.deleted_at()
        doubtful = {e.number for e in entries if deleted.get(e.tenant, float("-inf")) >= e.time_s}
        if not doubtful:
            return
        present = {entry.number for entry in self.manifest.entries(min(doubtful) - 1, max(doubtful))}
        if doubtful - present:
            raise RunError(
                "a tenant was deleted while its answers were learnt from; the result of that update is dropped"
            )

    def reconcile(self) -> None:
        """Repair after a crash: drop unlisted files and damaged shards, finish deletions, apply retention."""
        with self._changing():
            self.files.remove_damaged()
            self.files.sweep()
            self._deletions.resume()
            self._retention.make_room()

    # -- reading ------------------------------------------------------------------------------------------------

    def entries(self, *, after: int = 0, up_to: int | None = None) -> list[LogEntry]:
        """Return the answers numbered above `after` and at most `up_to`, in order."""
        return self.manifest.entries(after, up_to, None if self._domains is None else self._domains())

    def count(self, *, after: int = 0) -> int:
        """Count the answers numbered above `after`."""
        return self.manifest.count(after, None if self._domains is None else self._domains())

    def by_draft(self, newest: int) -> list[DraftedText]:
        """Sum up the newest answers by domain and draft, of all domains."""
        return self.manifest.by_draft(self.newest_number() - newest)

    def newest_number(self) -> int:
        """Return the last number ever given, 0 for an empty log. Deleted answers count."""
        return self.manifest.newest_number()

    def go_on_from(self, number: int) -> None:
        """Give numbers above `number`: drafts have learnt from answers up to it, in a log that was removed since."""
        self.manifest.go_on_from(number)

    def load(self, entries: Iterable[LogEntry]) -> list[LoggedAnswer]:
        """Return the answers of `entries`, in their order, as far as they are there. See `by_number`."""
        return list(self.by_number(entries).values())

    def by_number(self, entries: Iterable[LogEntry]) -> dict[int, LoggedAnswer]:
        """Return the answers of `entries` by their numbers, in their order.

        Answers deleted since are left out, and so are those whose shard is gone, damaged or foreign.
        """
        requested = list(entries)
        shards = {shard: self.files.listed(shard) for shard in dict.fromkeys(entry.shard for entry in requested)}
        answers = [(entry, shards[entry.shard].get(entry.number)) for entry in requested]
        return {entry.number: answer for entry, answer in answers if answer is not None and entry.is_of(answer)}

    def export(self, path: Path, tenant: str | None = None) -> int:
        """Write all readable answers (of one tenant) to a file. Return how many, 0 where no file was made.

        Later deletions reach it there. Nothing is logged meanwhile: answers wait in memory.
        """
        with self._changing():
            answers = self.load([entry for entry in self.entries() if tenant in (None, entry.tenant)])
            if answers:
                self._exports.add(path, answers)
        return len(answers)

    def sizes(self) -> dict[str, int]:
        """Return `shards`, `bytes`, `answers`, `tokens`, `refused_shards` and the persistent counters.

        `refused_shards` counts files that any process ever failed to read.
        """
        return self.manifest.sizes()

    def tenants(self) -> dict[str, int]:
        """Return tenant → number of answers, most first."""
        return self.manifest.tenants()

    def deleted_at(self) -> dict[str, float]:
        """Return tenant → time of its last deletion."""
        return self.manifest.deleted_at()

    def close(self) -> None:
        self.manifest.close()

    def _delete_answers(self, *tenants: str) -> None:
        try:
            for tenant in tenants:
                delete_files(self.folder.parent / ANSWERS, tenant)
        except OSError as error:
            raise RunError(f"what proposers keep of a tenant stays in {error.filename}: {error.strerror}") from error

    def _changing(self) -> AbstractContextManager[None]:
        return held(self.folder / CHANGING)
