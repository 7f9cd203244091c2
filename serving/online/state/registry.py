"""Registry of draft versions: an immutable folder and a row each, and a row for every promotion.

Each of several drafts has its own line of versions. A version is a candidate until it is judged. Then it is promoted,
inconclusive or refused. A promoted version is retired by its successor, or rolled back. Each change of the serving
version is one SQLite transaction.
"""

from __future__ import annotations

import json
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any

from distillspec.errors import ConfigError, RunError
from distillspec.models import read_metadata
from distillspec.serving.online.state.pool import Pool
from distillspec.serving.online.state.registry_tables import CURRENT, open_registry
from distillspec.serving.online.state.version import ONLY, ServedRecord, Version
from distillspec.serving.online.state.version_folders import incoming, problem_with, put_in_place, strays_in
from distillspec.types import short_hash

log = logging.getLogger(__name__)

PRESENT = "SELECT substr(weights_hash, 1, 12) FROM versions WHERE present"  # `Version.served_as`
ANY = object()  # `expected`: whatever serves now


class VersionRegistry:
    """Versions of one draft in `folder`, which is called `member`. Several processes may use it.

    `get`, `newest`, `served` and `pool` are about all drafts.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        self.folder, self._clock, self.member = folder, clock, ONLY
        self._database = open_registry(folder)
        self.pool = Pool(self._database)

    def of(self, member: str) -> VersionRegistry:
        """Return the registry of another draft's versions in the same folder. Closing either closes both."""
        registry = copy(self)
        registry.member = member
        return registry

    def add(
        self,
        write: Callable[[Path], Any],
        *,
        parent: str | None = None,
        requests: tuple[int, int] | None = None,
        metrics: dict[str, Any] | None = None,
    ) -> Version:
        """Let `write(folder)` save a draft (`save_draft`) and register it as a candidate.

        Args:
            requests: first and last number of the logged answers it learnt from.

        Raises:
            RunError: the saved folder is not complete.
        """
        first, last = requests or (None, None)
        with incoming(self.folder, write) as folder:
            weights_hash = read_metadata(folder)["identity"]["weights_hash"]
            figures = json.dumps(metrics or {})
            with self._database.transaction() as rows:
                number = 1 + (rows.execute("SELECT MAX(id) FROM versions").fetchone()[0] or 0)
                name = f"v{number:05d}-{short_hash(weights_hash)}"
                digest = put_in_place(folder, self.folder / name)
                rows.execute(
                    "INSERT INTO versions (name, member, weights_hash, digest, parent, status, created_s,"
                    " first_request, last_request, metrics, verdict, reason)"
                    " VALUES (?, ?, ?, ?, ?, 'candidate', ?, ?, ?, ?, '{}', '')",
                    (name, self.member, weights_hash, digest, parent, self._clock(), first, last, figures),
                )
        return self.get(name)

    def get(self, name: str) -> Version:
        """Return a version by its name.

        Raises:
            ConfigError: there is none of this name.
        """
        rows = self._database.rows("SELECT * FROM versions WHERE name = ?", (name,))
        if not rows:
            known = ", ".join(v.name for v in self.newest(3)) or "none yet"
            raise ConfigError(f"version={name} is not in {self.folder}; the newest are {known}")
        return self._version(rows[0])

    def versions(self, status: str | None = None) -> list[Version]:
        """Return all versions (of one status), oldest first."""
        query = "SELECT * FROM versions WHERE member = ?1 AND (?2 IS NULL OR status = ?2) ORDER BY id"
        return [self._version(row) for row in self._database.rows(query, (self.member, status))]

    def current(self) -> Version | None:
        """Return the promoted version. None before the first promotion."""
        name = self._database.value(CURRENT, (self.member,))
        return None if name is None else self.get(name)

    def find(self, weights_hash: str) -> Version | None:
        """Return the newest version with these weights, whether its folder is kept or not."""
        query = "SELECT * FROM versions WHERE weights_hash = ? AND member = ? ORDER BY id DESC LIMIT 1"
        return next(map(self._version, self._database.rows(query, (weights_hash, self.member))), None)

    def newest(self, count: int) -> list[Version]:
        """Return the last `count` versions of all drafts, oldest first."""
        rows = self._database.rows("SELECT * FROM versions ORDER BY id DESC LIMIT ?", (count,))
        return [self._version(row) for row in reversed(rows)]

    def present(self) -> list[str]:
        """Return the names of all drafts' versions whose folders are kept."""
        return [row["name"] for row in self._database.rows("SELECT name FROM versions WHERE present")]

    def newest_request(self) -> int:
        """Return the last number of a logged answer that any draft has learnt from, 0 without one."""
        return self._database.value("SELECT MAX(last_request) FROM versions") or 0

    def promotions(self) -> list[dict[str, Any]]:
        """Return all promotions (id, version, previous, reason, time_s), oldest first."""
        rows = self._database.rows("SELECT * FROM promotions WHERE member = ? ORDER BY id", (self.member,))
        return [dict(row) for row in rows]

    def judged(self, name: str, status: str, verdict: dict[str, Any], reason: str) -> None:
        """Record a verdict on a candidate. `promote` is a separate call."""
        with self._database.transaction() as rows:
            rows.execute(
                "UPDATE versions SET status = CASE WHEN status = 'candidate' THEN ? ELSE status END,"
                " verdict = ?, reason = ? WHERE name = ?",
                (status, json.dumps(verdict), reason, name),
            )

    def judged_in_vain(self) -> int:
        """Return how many candidates were judged, and not promoted, since the newest one that ever was."""
        promoted = "SELECT MAX(id) FROM versions WHERE name IN (SELECT version FROM promotions WHERE member = ?)"
        query = (
            "SELECT COUNT(*) FROM versions WHERE status IN ('inconclusive', 'refused') AND verdict != '{}'"
            f" AND member = ? AND id > COALESCE(({promoted}), 0)"
        )
        return int(self._database.value(query, (self.member, self.member)))

    def note(self, name: str, reason: str) -> None:
        """Set the reason for a version's status. The status stays."""
        with self._database.transaction() as rows:
            rows.execute("UPDATE versions SET reason = ? WHERE name = ?", (reason, name))

    def promote(self, name: str, reason: str, expected: object = ANY) -> Version:
        """Let a version serve from the next start on.

        Args:
            expected: name of the version that must serve now (None: none yet). Another process may have changed it.

        Raises:
            ConfigError: no such version. RunError: its folder is damaged, or something else than `expected` serves.
        """
        version = self.get(name)
        if problem := self.problem_of(version):
            raise RunError(f"{name} cannot serve: {problem}")
        with self._database.transaction() as rows:
            row = rows.execute(CURRENT, (self.member,)).fetchone()
            current = None if row is None else row[0]
            if expected is not ANY and current != expected:
                raise RunError(f"{name} is not promoted: {current} serves now, not {expected}")
            if current != name:
                rows.execute(
                    "UPDATE versions SET status = 'retired' WHERE name = ? AND status = 'promoted'", (current,)
                )
                self._set_current(rows, name, current, reason)
        return self.get(name)

    def rollback(self, reason: str, expected: object = ANY) -> Version:
        """Let the last intact predecessor serve again.

        Raises:
            RunError: there is none, or something else than `expected` serves.
        """
        predecessor = self.predecessor()
        with self._database.transaction() as rows:
            row = rows.execute(CURRENT, (self.member,)).fetchone()
            current = None if row is None else row[0]
            if expected is not ANY and current != expected:
                raise RunError(f"{expected} is not rolled back: {current} serves now")
            if predecessor is None:
                raise RunError(f"there is no earlier version to go back to from {current}")
            rows.execute("UPDATE versions SET status = 'rolled_back', reason = ? WHERE name = ?", (reason, current))
            self._set_current(rows, predecessor.name, current, reason)
        return self.get(predecessor.name)

    def predecessor(self) -> Version | None:
        """Return the target of a rollback: the last retired version whose folder is intact."""
        return next((v for v in self._retired() if self.problem_of(v) is None), None)

    def challenged_by(self) -> Version | None:
        """Return the version with whose acceptance in service the current one's is compared. Its folder is not checked.

        None: the current version came by a rollback and was compared before.
        """
        last = self.promotions()[-1:]
        if not last or (last[0]["previous"] and self.get(last[0]["previous"]).status == "rolled_back"):
            return None
        return next(self._retired(), None)

    def lineage(self, version: Version) -> Iterator[Version]:
        """Yield the ancestors of a version, its parent first."""
        while version.parent is not None:
            version = self.get(version.parent)
            yield version

    def keep_served(self, records: Sequence[ServedRecord]) -> None:
        """Store acceptance in service, for comparisons after a restart."""
        with self._database.transaction() as rows:
            rows.executemany(
                "INSERT OR REPLACE INTO served VALUES (?, ?, ?)",
                [(r.version, json.dumps(r.totals), json.dumps(r.recent)) for r in records],
            )

    def served(self) -> list[ServedRecord]:
        """Return the last record that `keep_served` stored of every version."""
        rows = self._database.rows("SELECT * FROM served")
        return [ServedRecord(row["version"], json.loads(row["totals"]), json.loads(row["seen"])) for row in rows]

    def boot(self) -> Version | None:
        """Return the version to start with: the promoted one or, if its folder is damaged, its predecessor.

        None: no version that was ever promoted is intact.
        """
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
        """Return why a version's folder cannot be served, or None if it is intact."""
        if not version.present or not version.path.is_dir():
            return f"{version.path} is not there"
        digest = self._database.value("SELECT digest FROM versions WHERE name = ?", (version.name,))
        return problem_with(version.path, digest)

    def clear_away(self, keep: int) -> list[str]:
        """Delete the folders of all but the newest `keep` versions out of service, and folders left by crashes.

        Candidates, the current version, its predecessor, and given drafts stay. Return the names of those deleted.
        """
        current, predecessor = self.current(), self.predecessor()
        safe = {v.name for v in (current, predecessor) if v is not None}
        learnt = [v for v in self.versions() if v.present and (v.parent or v.last_request) is not None]
        idle = [v for v in learnt if v.name not in safe and v.status != "candidate"]
        gone = [v.name for v in idle[: max(0, len(idle) - keep)]]
        with self._database.transaction() as rows:
            rows.executemany("UPDATE versions SET present = 0 WHERE name = ?", [(name,) for name in gone])
            rows.execute(f"UPDATE served SET seen = '[]' WHERE version NOT IN ({PRESENT})")
            known = {row[0] for row in rows.execute("SELECT name FROM versions WHERE present")}
            strays = strays_in(self.folder, known)  # within the transaction, so that no version is added in between
        for path in strays:
            shutil.rmtree(path, ignore_errors=True)
        return gone

    def disown(self, reason: str) -> list[str]:
        """Refuse versions that learnt from logged answers, promoted or not. Delete their folders, return names."""
        learnt = [version for version in self.versions() if version.last_request is not None and version.present]
        with self._database.transaction() as rows:
            gone = "UPDATE versions SET status = 'refused', present = 0, reason = ? WHERE name = ?"
            rows.executemany(gone, [(reason, version.name) for version in learnt])
            forget = "UPDATE versions SET verdict = '{}' WHERE member = ? AND last_request IS NOT NULL"
            rows.execute(forget, (self.member,))
        for version in learnt:
            shutil.rmtree(version.path, ignore_errors=True)
        return [version.name for version in learnt]

    def close(self) -> None:
        self._database.close()

    def _retired(self) -> Iterator[Version]:
        """Yield the retired versions, the last to serve first."""
        names = dict.fromkeys(row["version"] for row in reversed(self.promotions()))
        return (version for version in map(self.get, names) if version.status == "retired")

    def _set_current(self, rows: sqlite3.Connection, name: str, previous: str | None, reason: str) -> None:
        rows.execute("UPDATE versions SET status = 'promoted' WHERE name = ?", (name,))
        rows.execute(
            "INSERT INTO promotions (version, member, previous, reason, time_s) VALUES (?, ?, ?, ?, ?)",
            (name, self.member, previous, reason, self._clock()),
        )

    def _version(self, row: sqlite3.Row) -> Version:
        values = {key: row[key] for key in row.keys() if key not in ("id", "digest")}  # noqa: SIM118 (not a mapping)
        values |= {key: json.loads(values[key]) for key in ("metrics", "verdict")}
        return Version(path=self.folder / row["name"], **{**values, "present": bool(row["present"])})
