"""The draft's versions: immutable folders and a row each; which one serves is one row more.

A version is a candidate until it is judged; then promoted, inconclusive or refused. What was promoted is retired by
its successor, or rolled back. Everything that changes what serves is one SQLite transaction.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import sqlite3
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distillspec.errors import ConfigError, RunError
from distillspec.files import verify_folder
from distillspec.models import read_metadata
from distillspec.serving.online.database import Database
from distillspec.serving.online.layout import REGISTRY
from distillspec.types import short_hash

log = logging.getLogger(__name__)

SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, weights_hash TEXT NOT NULL, digest TEXT NOT NULL,
    parent TEXT, status TEXT NOT NULL, created_s REAL NOT NULL, first_request INTEGER, last_request INTEGER,
    metrics TEXT NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL, present INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS promotions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, version TEXT NOT NULL, previous TEXT, reason TEXT NOT NULL,
    time_s REAL NOT NULL
);
CREATE TABLE IF NOT EXISTS served (version TEXT PRIMARY KEY, totals TEXT NOT NULL, seen TEXT NOT NULL);
"""
CURRENT = "SELECT version FROM promotions ORDER BY id DESC LIMIT 1"
PRESENT = "SELECT substr(weights_hash, 1, 12) FROM versions WHERE present"  # as they are served
ANY = object()  # promote whatever serves now


@dataclass(frozen=True)
class Version:
    """One row; `first_request` to `last_request` are the numbers of the logged requests it learnt from."""

    name: str
    path: Path
    weights_hash: str
    parent: str | None
    status: str  # candidate | promoted | inconclusive | refused | retired | rolled_back
    created_s: float
    first_request: int | None = None
    last_request: int | None = None
    metrics: dict[str, Any] = field(default_factory=dict)
    verdict: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    present: bool = True  # False: its folder was cleared away

    @property
    def served_as(self) -> str:
        """What the engine calls it."""
        return short_hash(self.weights_hash)


@dataclass(frozen=True)
class ServedRecord:
    """What is remembered of a version's service, under the engine's name for it."""

    version: str  # `Version.served_as`
    totals: dict[str, int]  # requests, tried, accepted
    seen: list[list[Any]]  # the newest requests: domain, tried, accepted


class VersionRegistry:
    """The versions in `folder`; several processes may use one at a time."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self._clock = folder, clock
        self._database = Database(folder / REGISTRY, SCHEMA)

    def add(
        self,
        write: Callable[[Path], Any],
        *,
        parent: str | None = None,
        requests: tuple[int, int] | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> Version:
        """Let `write(folder)` save a draft (`save_draft`), and register it as a candidate."""
        aside = self.folder / f".incoming-{os.getpid()}-{uuid.uuid4().hex[:8]}"
        try:
            write(aside)
            if problem := verify_folder(aside):
                raise RunError(f"a new version is not complete: {problem}")
            weights_hash = read_metadata(aside)["identity"]["weights_hash"]
            first, last = requests or (None, None)
            figures = json.dumps(metrics or {})
            with self._database.transaction() as rows:
                number = 1 + (rows.execute("SELECT MAX(id) FROM versions").fetchone()[0] or 0)
                name = f"v{number:05d}-{short_hash(weights_hash)}"
                shutil.rmtree(self.folder / name, ignore_errors=True)  # a crash came between renaming and registering
                os.replace(aside, self.folder / name)
                rows.execute(
                    "INSERT INTO versions (name, weights_hash, digest, parent, status, created_s, first_request,"
                    " last_request, metrics, verdict, reason) VALUES (?, ?, ?, ?, 'candidate', ?, ?, ?, ?, '{}', '')",
                    (name, weights_hash, _digest(self.folder / name), parent, self._clock(), first, last, figures),
                )
        finally:
            shutil.rmtree(aside, ignore_errors=True)
        return self.get(name)

    def get(self, name: str) -> Version:
        """A version by its name.

        Raises:
            ConfigError: there is none of this name.
        """
        found = self._database.rows("SELECT * FROM versions WHERE name = ?", (name,))
        if not found:
            known = ", ".join(v.name for v in self.versions()[-3:]) or "none yet"
            raise ConfigError(f"version={name} is not in {self.folder}; the newest are {known}")
        return self._version(found[0])

    def versions(self, status: str | None = None) -> list[Version]:
        """All versions, oldest first."""
        found = self._database.rows("SELECT * FROM versions ORDER BY id")
        return [self._version(row) for row in found if status is None or row["status"] == status]

    def current(self) -> Version | None:
        """The promoted version; None before the first promotion."""
        name = self._database.value(CURRENT)
        return None if name is None else self.get(name)

    def find(self, weights_hash: str) -> Version | None:
        """The newest version with these weights."""
        found = self._database.rows(
            "SELECT * FROM versions WHERE weights_hash = ? AND present ORDER BY id DESC LIMIT 1", (weights_hash,)
        )
        return self._version(found[0]) if found else None

    def newest(self, count: int) -> list[Version]:
        """The last versions, oldest first."""
        found = self._database.rows("SELECT * FROM versions ORDER BY id DESC LIMIT ?", (count,))
        return [self._version(row) for row in reversed(found)]

    def promotions(self) -> list[dict[str, Any]]:
        """Who served when and why, oldest first."""
        return [dict(row) for row in self._database.rows("SELECT * FROM promotions ORDER BY id")]

    def judged(self, name: str, status: str, verdict: dict[str, Any], reason: str) -> None:
        """Record a verdict on a candidate; promotion is a step of its own."""
        with self._database.transaction() as rows:
            rows.execute(
                "UPDATE versions SET status = CASE WHEN status = 'candidate' THEN ? ELSE status END,"
                " verdict = ?, reason = ? WHERE name = ?",
                (status, json.dumps(verdict), reason, name),
            )

    def note(self, name: str, reason: str) -> None:
        """Say of a version why it stands as it does; its status stays."""
        with self._database.transaction() as rows:
            rows.execute("UPDATE versions SET reason = ? WHERE name = ?", (reason, name))

    def promote(self, name: str, reason: str, expected: object = ANY) -> Version:
        """Let a version serve from the next start on.

        Args:
            expected: the name that must serve now (None: nothing yet); another process may have been faster.

        Raises:
            ConfigError: no such version. RunError: its folder is damaged, or something else than `expected` serves.
        """
        version = self.get(name)
        if problem := self.problem_of(version):
            raise RunError(f"{name} cannot serve: {problem}")
        with self._database.transaction() as rows:
            found = rows.execute(CURRENT).fetchone()
            current = None if found is None else found[0]
            if expected is not ANY and current != expected:
                raise RunError(f"{name} is not promoted: {current} serves now, not {expected}")
            if current != name:
                rows.execute(
                    "UPDATE versions SET status = 'retired' WHERE name = ? AND status = 'promoted'", (current,)
                )
                self._appoint(rows, name, current, reason)
        return self.get(name)

    def rollback(self, reason: str, expected: object = ANY) -> Version:
        """Let the last intact predecessor serve again.

        Raises:
            RunError: there is none, or something else than `expected` serves.
        """
        predecessor = self.predecessor()
        with self._database.transaction() as rows:
            found = rows.execute(CURRENT).fetchone()
            current = None if found is None else found[0]
            if expected is not ANY and current != expected:
                raise RunError(f"{expected} is not rolled back: {current} serves now")
            if predecessor is None:
                raise RunError(f"there is no earlier version to go back to from {current}")
            rows.execute("UPDATE versions SET status = 'rolled_back', reason = ? WHERE name = ?", (reason, current))
            self._appoint(rows, predecessor.name, current, reason)
        return self.get(predecessor.name)

    def predecessor(self) -> Version | None:
        """What a rollback would go back to: the last retired version whose folder is intact."""
        return next((v for v in self._retired() if self.problem_of(v) is None), None)

    def challenged_by(self) -> Version | None:
        """The version whose service that of the current one is held against; its folder is not looked at.

        None where the current one came by a rollback: it has stood its trial before.
        """
        last = self.promotions()[-1:]
        if not last or (last[0]["previous"] and self.get(last[0]["previous"]).status == "rolled_back"):
            return None
        return next(self._retired(), None)

    def lineage(self, version: Version) -> Iterator[Version]:
        """What a version was made from, its parent first."""
        while version.parent is not None:
            version = self.get(version.parent)
            yield version

    def keep_served(self, records: Sequence[ServedRecord]) -> None:
        """Remember acceptance in service, for comparisons after a restart."""
        with self._database.transaction() as rows:
            rows.executemany(
                "INSERT OR REPLACE INTO served VALUES (?, ?, ?)",
                [(r.version, json.dumps(r.totals), json.dumps(r.seen)) for r in records],
            )

    def served(self) -> list[ServedRecord]:
        """What `keep_served` was told last of every version."""
        found = self._database.rows("SELECT * FROM served")
        return [ServedRecord(row["version"], json.loads(row["totals"]), json.loads(row["seen"])) for row in found]

    def boot(self) -> Version | None:
        """The version to start with: the promoted one or, where its folder is damaged, the one before; None where
        nothing that was ever promoted is intact."""
        current = self.current()
        if current is None:
            return None
        problem = self.problem_of(current)
        if problem is None:
            return current
        if self.predecessor() is None:
            log.error("the promoted draft %s is damaged (%s), and there is no earlier one", current.name, problem)
            return None
        log.error("the promoted draft %s is damaged (%s); going back", current.name, problem)
        return self.rollback(f"damaged: {problem}", expected=current.name)

    def problem_of(self, version: Version) -> str | None:
        """Why a version's folder cannot be trusted; None where it is as it was made."""
        if not version.present or not version.path.is_dir():
            return f"{version.path} is not there"
        problem = verify_folder(version.path)
        recorded = self._database.value("SELECT digest FROM versions WHERE name = ?", (version.name,))
        if problem is None and recorded != _digest(version.path):
            problem = f"{version.path} is not what was registered"
        return problem

    def clear_away(self, keep: int) -> list[str]:
        """Delete folders of versions that will not serve again but for the newest `keep`, and what crashes left."""
        current, predecessor = self.current(), self.predecessor()
        safe = {v.name for v in (current, predecessor) if v is not None}
        idle = [v for v in self.versions() if v.name not in safe and v.present and v.status != "candidate"]
        gone = [v.name for v in idle[: max(0, len(idle) - keep)]]
        with self._database.transaction() as rows:
            rows.executemany("UPDATE versions SET present = 0 WHERE name = ?", [(name,) for name in gone])
            rows.execute(f"UPDATE served SET seen = '[]' WHERE version NOT IN ({PRESENT})")
            known = {row[0] for row in rows.execute("SELECT name FROM versions WHERE present")}
            strays = [p for p in self.folder.iterdir() if p.is_dir() and p.name not in known and _is_dead(p)]
        for path in strays:
            shutil.rmtree(path, ignore_errors=True)
        return gone

    def close(self) -> None:
        self._database.close()

    def _retired(self) -> Iterator[Version]:
        """Retired versions, the last to serve first."""
        names = dict.fromkeys(row["version"] for row in reversed(self.promotions()))
        return (version for version in map(self.get, names) if version.status == "retired")

    def _appoint(self, rows: sqlite3.Connection, name: str, previous: str | None, reason: str) -> None:
        rows.execute("UPDATE versions SET status = 'promoted' WHERE name = ?", (name,))
        rows.execute(
            "INSERT INTO promotions (version, previous, reason, time_s) VALUES (?, ?, ?, ?)",
            (name, previous, reason, self._clock()),
        )

    def _version(self, row: sqlite3.Row) -> Version:
        values = {key: row[key] for key in row.keys() if key not in ("id", "digest")}  # noqa: SIM118 (not a mapping)
        values |= {key: json.loads(values[key]) for key in ("metrics", "verdict")}
        return Version(path=self.folder / row["name"], **{**values, "present": bool(row["present"])})


def _digest(folder: Path) -> str:
    """One digest for all files: that of the folder's own list of digests."""
    return hashlib.sha256((folder / "sha256.json").read_bytes()).hexdigest()


def _is_dead(path: Path) -> bool:
    """Whether no process works on an incoming folder (any other stray folder is dead).

    What fills it writes into a folder beside it, with a longer name: `..incoming-PID-….tmp`.
    """
    if not path.name.lstrip(".").startswith("incoming-"):
        return True
    try:
        os.kill(int(path.name.split("-")[1]), 0)
    except (ProcessLookupError, ValueError):
        return True
    except PermissionError:
        return False
    return False
