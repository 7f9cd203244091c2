"""The replay log on disk: shards, and a manifest that alone says which of them count.

A shard is written aside, synced and renamed, then entered in the manifest in one transaction with its answers. What
the manifest does not know is removed at the next start, what it knows and is damaged is forgotten and counted; so a
crash at any point costs answers that were not yet acknowledged, and never brings deleted ones back.
"""

from __future__ import annotations

import json
import logging
import random
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from distillspec.config import ReplayConfig
from distillspec.errors import ConfigError, RunError
from distillspec.files import sha256_of, write_private
from distillspec.serving.online.clock import SteadyClock
from distillspec.serving.online.database import Database
from distillspec.serving.online.layout import MANIFEST
from distillspec.serving.online.lock import held
from distillspec.serving.online.records import LoggedAnswer, LogKey, Split
from distillspec.serving.online.shard import ShardRefused, load_shard, save_shard

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shards (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT UNIQUE NOT NULL, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
    newest_s REAL NOT NULL, fresh INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, shard INTEGER NOT NULL REFERENCES shards(id) ON DELETE CASCADE,
    place INTEGER NOT NULL, request_id TEXT NOT NULL, tenant TEXT NOT NULL, domain TEXT NOT NULL, split TEXT NOT NULL,
    tokens INTEGER NOT NULL, tried INTEGER NOT NULL, accepted INTEGER NOT NULL, time_s REAL NOT NULL
);
CREATE INDEX IF NOT EXISTS answers_of_shard ON answers (shard);
CREATE TABLE IF NOT EXISTS deletions (tenant TEXT PRIMARY KEY, time_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS rewrites (shard INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS refusals (file TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)
"""
COUNT = "SELECT COUNT(*) FROM answers WHERE number > ? AND split = ?"
MIB = 1 << 20
FULL = 0.9  # of `replay.max_mib`: whole shards come and go, so that it is rarely met exactly


@dataclass(frozen=True)
class Entry:
    """One answer as the manifest knows it; `number` grows in the order of arrival, for ever."""

    number: int
    shard: int
    place: int
    request_id: str
    tenant: str
    domain: str
    split: Split
    tokens: int
    tried: int
    accepted: int
    time_s: float


class ReplayLog:
    """The log in `folder`. Several processes may read; those that write wait for each other.

    Args:
        key: whose signal it holds; None reads whatever is there.
        write: how a file comes to be: `(path, write_to(temporary))`. A seam for tests of full disks.

    Raises:
        ConfigError: the folder holds another target's log.
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
        self._write, self._random = write, random.Random(seed)
        self._database = Database(folder / MANIFEST, SCHEMA)
        self.key = self._agreed_key(key)
        newest = self._database.value("SELECT MAX(time_s) FROM answers") or 0.0
        self.clock = clock or SteadyClock(newest)
        self._deletions = {tenant: (at, min(at, self.clock())) for tenant, at in self.deleted_at().items()}
        self.refused: dict[str, str] = {}  # file → why its answers are not read
        self.full = False  # new answers take the place of others; known since this process wrote last

    # -- writing ------------------------------------------------------------------------------------------------

    def append(self, answers: Sequence[LoggedAnswer]) -> int:
        """Put answers on disk; how many: those of tenants deleted since they were recorded stay out.

        Raises:
            RunError: the disk is full; nothing was kept.
        """
        with self._changing():
            deleted = self._follow_deletions()
            kept = [a for a in answers if a.time_s > deleted.get(a.tenant, float("-inf"))]
            if kept:
                path = self._save(kept)
                with self._taking_up(path) as rows:
                    self._enter(rows, path, kept)
            self._make_room()
        return len(kept)

    def delete_tenant(self, tenant: str) -> int:
        """Delete a tenant's answers, recorded up to now, from shards and manifest; how many were listed.

        They are off the list at once. Where a crash, a full disk or a busy reader keeps their bytes in files, the next
        `reconcile` or deletion, of whichever tenant, removes them. The tenant's name stays in the list of deletions.
        Files are overwritten or removed; what the disk or a backup keeps of them is not reached.

        Raises:
            RunError: bytes are left for now, see above.
        """
        with self._changing():
            with self._database.transaction() as rows:
                newest = rows.execute("SELECT MAX(time_s) FROM answers WHERE tenant = ?", (tenant,)).fetchone()[0]
                now = max(self.clock(), newest or 0.0)  # this process's clock may be behind the writer's
                rows.execute("INSERT OR REPLACE INTO deletions VALUES (?, ?)", (tenant, now))
                rows.execute(
                    "INSERT OR IGNORE INTO rewrites SELECT DISTINCT shard FROM answers WHERE tenant = ?", (tenant,)
                )
                count = rows.execute("DELETE FROM answers WHERE tenant = ?", (tenant,)).rowcount
            self._deletions[tenant] = (now, now)
            self._sweep()
            self._finish_deletions()
        return count

    @contextmanager
    def still_there(self, entries: Sequence[Entry]) -> Iterator[None]:
        """Hold deletions off while the block runs.

        Raises:
            RunError: a tenant of these entries was deleted, and some of them with it.
        """
        with self._changing():
            first, last = min(e.number for e in entries), max(e.number for e in entries)
            present = {entry.number for entry in self.entries(after=first - 1, up_to=last)}
            deleted = self.deleted_at()
            gone = [e for e in entries if e.number not in present]  # or made room for others
            if any(deleted.get(e.tenant, float("-inf")) >= e.time_s for e in gone):
                raise RunError("a tenant was deleted while its answers were learnt from; what came of it is dropped")
            yield

    def reconcile(self) -> None:
        """After a crash: files that the manifest does not know go, entries without an intact file are forgotten, and
        deletions are finished."""
        with self._changing():
            shards = self._database.rows("SELECT id, file, bytes FROM shards")
            damaged = [row["id"] for row in shards if not _has_size(self.folder / row["file"], row["bytes"])]
            self._forget(damaged)
            self._count("damaged_shards", len(damaged))
            self._sweep()
            self._resume_deletions()
            self._make_room()

    # -- reading ------------------------------------------------------------------------------------------------

    def entries(self, *, after: int = 0, up_to: int | None = None, split: Split | None = None) -> list[Entry]:
        """What is there with a number above `after` (and at most `up_to`), in order."""
        query = "SELECT * FROM answers WHERE number > ? AND number <= ?"
        found = self._database.rows(f"{query} ORDER BY number", (after, up_to if up_to is not None else 1 << 62))
        return [Entry(**row) for row in found if split is None or row["split"] == split]

    def count(self, *, after: int = 0, split: Split) -> int:
        """How many answers `entries` would give."""
        return int(self._database.value(COUNT, (after, split)))

    def newest_number(self) -> int:
        """The number of the last answer ever entered, deleted ones included; 0 for an empty log."""
        return self._database.value("SELECT seq FROM sqlite_sequence WHERE name = 'answers'") or 0

    def load(self, entries: Iterable[Entry]) -> list[LoggedAnswer]:
        """The answers of entries, in their order; those deleted since, and those whose shard is gone, damaged or
        foreign, are left out."""
        wanted = list(entries)
        shards = {shard: self._listed_in(shard) for shard in dict.fromkeys(entry.shard for entry in wanted)}
        found = [(entry, shards[entry.shard].get(entry.number)) for entry in wanted]
        return [answer for entry, answer in found if answer is not None and _is_of(entry, answer)]

    def sizes(self) -> dict[str, int]:
        """`shards`, `bytes`, `answers`, `held_out`, `tokens`, `refused_shards` (files that some process could not
        read, ever) and the counters kept in the manifest."""
        shards = self._database.rows("SELECT COUNT(*) n, COALESCE(SUM(bytes), 0) bytes FROM shards")[0]
        answers = self._database.rows(
            "SELECT COUNT(*) n, COALESCE(SUM(tokens), 0) tokens, COALESCE(SUM(split = 'held_out'), 0) held FROM answers"
        )[0]
        counters = {row["name"]: row["value"] for row in self._database.rows("SELECT * FROM counters")}
        return {
            "shards": shards["n"],
            "bytes": shards["bytes"],
            "answers": answers["n"],
            "held_out": answers["held"],
            "tokens": answers["tokens"],
            "refused_shards": self._database.value("SELECT COUNT(*) FROM refusals"),
            **counters,
        }

    def tenants(self) -> dict[str, int]:
        """Tenant → answers."""
        found = self._database.rows("SELECT tenant, COUNT(*) n FROM answers GROUP BY tenant ORDER BY n DESC")
        return {row["tenant"]: row["n"] for row in found}

    def deleted_at(self) -> dict[str, float]:
        """Tenant → when its answers were deleted last."""
        return {row["tenant"]: row["time_s"] for row in self._database.rows("SELECT * FROM deletions")}

    def close(self) -> None:
        self._database.close()

    # -- parts --------------------------------------------------------------------------------------------------

    def _follow_deletions(self) -> dict[str, float]:
        """Tenant → the time, by this process's clock, up to which its answers stay out.

        Another process deletes by a clock of its own, which may have been set since this one began: a deletion not seen
        before happened at some time until now.
        """
        for tenant, at in self.deleted_at().items():
            if self._deletions.get(tenant, (None, 0.0))[0] != at:
                self._deletions[tenant] = (at, self.clock())
        return {tenant: here for tenant, (_, here) in self._deletions.items()}

    def _changing(self) -> Any:
        return held(self.folder / "changing.lock")

    def _agreed_key(self, key: LogKey | None) -> LogKey:
        with self._database.transaction() as rows:
            found = rows.execute("SELECT value FROM facts WHERE name = 'key'").fetchone()
            if found is None:
                if key is None:
                    raise ConfigError(f"the log in {self.folder} is empty; a server with online=on fills it")
                rows.execute("INSERT INTO facts VALUES ('key', ?)", (json.dumps(asdict(key)),))
                return key
        recorded = LogKey(**json.loads(found[0]))
        if key is not None and key != recorded:
            name = next(name for name, value in asdict(key).items() if getattr(recorded, name) != value)
            raise ConfigError(
                f"the log in {self.folder} was recorded with another {name} ({getattr(recorded, name)}, not "
                f"{getattr(key, name)}); use another online.folder"
            )
        return recorded

    def _save(self, answers: Sequence[LoggedAnswer]) -> Path:
        path = self.folder / f"shard-{uuid.uuid4().hex}.safetensors"
        self._write(path, lambda temporary: save_shard(temporary, answers, self.key))
        return path

    def _enter(self, rows: sqlite3.Connection, path: Path, answers: Sequence[LoggedAnswer]) -> None:
        size, newest = path.stat().st_size, max(a.time_s for a in answers)
        shard = rows.execute(
            "INSERT INTO shards (file, sha256, bytes, newest_s) VALUES (?, ?, ?, ?)",
            (path.name, sha256_of(path), size, newest),
        ).lastrowid
        rows.executemany(
            "INSERT INTO answers (shard, place, request_id, tenant, domain, split, tokens, tried, accepted, time_s)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            [
                (shard, i, a.request_id, a.tenant, a.domain, a.split, len(a), a.tried, a.accepted, a.time_s)
                for i, a in enumerate(answers)
            ],
        )

    @contextmanager
    def _taking_up(self, path: Path) -> Iterator[sqlite3.Connection]:
        """A transaction that enters a new file; where it fails, the file goes."""
        try:
            with self._database.transaction() as rows:
                yield rows
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def _resume_deletions(self) -> None:
        """Finish what a crash left. A full disk keeps no server from starting: nobody reads what is off the list."""
        if not self._database.value("SELECT COUNT(*) FROM rewrites"):
            return
        try:
            self._finish_deletions()
        except Exception as error:
            log.error("a tenant's deletion in %s is not finished, the next start tries again: %s", self.folder, error)

    def _finish_deletions(self) -> None:
        """Remove from files and manifest the answers that were taken off the list."""
        for row in self._database.rows("SELECT shard FROM rewrites"):
            self._rewrite(row["shard"])
        self._database.scrub()
        with self._database.transaction() as rows:
            rows.execute("DELETE FROM rewrites")

    def _rewrite(self, shard: int) -> None:
        """Put a shard's listed answers into a new file; their numbers stay."""
        old = self._database.rows("SELECT file FROM shards WHERE id = ?", (shard,))
        listed = self._database.rows("SELECT place FROM answers WHERE shard = ? ORDER BY place", (shard,))
        answers = self._load_shard(shard)
        kept = [row["place"] for row in listed if row["place"] < len(answers)]
        if not kept:
            self._forget([shard])
            return
        path = self._save([answers[place] for place in kept])
        with self._taking_up(path) as rows:
            rows.execute(
                "UPDATE shards SET file = ?, sha256 = ?, bytes = ? WHERE id = ?",
                (path.name, sha256_of(path), path.stat().st_size, shard),
            )
            rows.executemany(
                "UPDATE answers SET place = ? WHERE shard = ? AND place = ?",
                [(new, shard, place) for new, place in enumerate(kept)],
            )
        (self.folder / old[0]["file"]).unlink(missing_ok=True)

    def _sweep(self) -> None:
        """Remove files that the manifest does not know."""
        known = {row["file"] for row in self._database.rows("SELECT file FROM shards")}
        strays = [path for path in self.folder.glob("*shard-*") if path.name not in known]
        for path in strays:
            path.unlink(missing_ok=True)
        self._count("stray_files", len(strays))

    def _listed_in(self, shard: int) -> dict[int, LoggedAnswer]:
        """Number → answer. A deletion between the two reads leaves places that are no longer those of the file."""
        answers = self._load_shard(shard)
        listed = self._database.rows("SELECT number, place FROM answers WHERE shard = ?", (shard,))
        return {row["number"]: answers[row["place"]] for row in listed if row["place"] < len(answers)}

    def _load_shard(self, shard: int) -> list[LoggedAnswer]:
        found = self._database.rows("SELECT file, sha256 FROM shards WHERE id = ?", (shard,))
        if not found:
            return []  # made room for others since
        path = self.folder / found[0]["file"]
        try:
            if sha256_of(path) != found[0]["sha256"]:
                raise ShardRefused(f"{path.name} does not match its sha256 (truncated or changed)")
            return load_shard(path, self.key)
        except (ShardRefused, FileNotFoundError) as problem:
            if path.is_file():  # else it made room for others, or was rewritten, since
                self._refuse(path.name, str(problem))
            return []

    def _refuse(self, file: str, reason: str) -> None:
        """Say so once, and count it once for all processes."""
        if file in self.refused:
            return
        log.warning("a shard of the log is skipped: %s", reason)
        self.refused[file] = reason
        with suppress(sqlite3.Error), self._database.transaction() as rows:  # uncounted on a full disk, not unread
            rows.execute("INSERT OR IGNORE INTO refusals VALUES (?, ?)", (file, reason))

    def _make_room(self) -> None:
        """Drop what is past its retention, then what exceeds the budget."""
        oldest = self.clock() - self.config.retention_days * 86400
        gone = [row["id"] for row in self._database.rows("SELECT id FROM shards WHERE newest_s < ?", (oldest,))]
        self._forget(gone)
        self._count("expired_shards", len(gone))
        budget = int(self.config.max_mib * MIB)
        self.full = (self._database.value("SELECT SUM(bytes) FROM shards") or 0) >= FULL * budget
        if self.config.keep == "fifo":
            self._drop_oldest(budget)
        else:
            self._age(int(budget * self.config.fresh_share), budget)

    def _drop_oldest(self, budget: int) -> None:
        shards = self._database.rows("SELECT id, bytes FROM shards ORDER BY id")
        total, gone = sum(row["bytes"] for row in shards), []
        for row in shards[:-1]:
            if total <= budget:
                break
            total -= row["bytes"]
            gone.append(row["id"])
        self._forget(gone)
        self._count("replaced_shards", len(gone))

    def _age(self, fresh_budget: int, budget: int) -> None:
        """The oldest of too many fresh shards ask for a place in the reservoir (Vitter 1985, algorithm R).

        There the n-th shard to ask finds room, or replaces a random one with probability (places / n), or goes.
        """
        fresh = self._database.rows("SELECT id, bytes FROM shards WHERE fresh ORDER BY id")
        total = sum(row["bytes"] for row in fresh)
        for row in fresh[:-1]:
            if total <= fresh_budget:
                break
            total -= row["bytes"]
            self._ask_for_a_place(row["id"], row["bytes"], budget - fresh_budget)

    def _ask_for_a_place(self, shard: int, size: int, budget: int) -> None:
        kept = self._database.rows("SELECT id, bytes FROM shards WHERE NOT fresh")
        asked = self._count("reservoir_asked", 1)
        used, gone = sum(row["bytes"] for row in kept), []
        if used + size > budget:
            if not kept or self._random.random() >= len(kept) / asked:
                self._forget([shard])
                self._count("replaced_shards", 1)
                return
            self._random.shuffle(kept)
            while kept and used + size > budget:
                row = kept.pop()
                used -= row["bytes"]
                gone.append(row["id"])
        self._forget(gone)
        self._count("replaced_shards", len(gone))
        with self._database.transaction() as rows:
            rows.execute("UPDATE shards SET fresh = 0 WHERE id = ?", (shard,))

    def _forget(self, shards: Sequence[int]) -> None:
        """The entries go first: a file without them is a stray, never an answer."""
        if not shards:
            return
        marks = ", ".join("?" * len(shards))
        files = self._database.rows(f"SELECT file FROM shards WHERE id IN ({marks})", shards)
        with self._database.transaction() as rows:
            rows.execute(f"DELETE FROM shards WHERE id IN ({marks})", shards)
        for row in files:
            (self.folder / row["file"]).unlink(missing_ok=True)

    def _count(self, name: str, more: int) -> int:
        """Add to a counter of the manifest; what it stands at then."""
        if more == 0:
            return 0
        with self._database.transaction() as rows:
            rows.execute(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                (name, more),
            )
            return int(rows.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0])


def _has_size(path: Path, size: int) -> bool:
    return path.is_file() and path.stat().st_size == size


def _is_of(entry: Entry, answer: LoggedAnswer) -> bool:
    known = (entry.request_id, entry.tenant, entry.split, entry.time_s, entry.tokens)
    return known == (answer.request_id, answer.tenant, answer.split, answer.time_s, len(answer))
