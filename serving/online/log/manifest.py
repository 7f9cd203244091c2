"""Manifest of the replay log: the SQLite file that alone says which shards and answers count."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from distillspec.errors import ConfigError
from distillspec.serving.online.log.conversations import conversation_of, prompt_hash
from distillspec.serving.online.log.manifest_tables import open_manifest
from distillspec.serving.online.log.records import LogEntry, LoggedAnswer, LogKey
from distillspec.serving.online.state.database import DatabaseFailed

SUMS = ("domain", "draft", "COUNT(*)", "SUM(tokens)", "SUM(tried)", "SUM(accepted)")  # as in `DraftedText`
COUNT = "SELECT COUNT(*) FROM answers WHERE number > ?"
TOTALS = (
    "SELECT COUNT(*) shards, COALESCE(SUM(bytes), 0) bytes FROM shards",
    "SELECT COUNT(*) answers, COALESCE(SUM(tokens), 0) tokens FROM answers",
    "SELECT COUNT(*) refused_shards FROM refusals",
)
ENTRY = ", ".join(field.name for field in fields(LogEntry))
ANSWER = (
    "INSERT INTO answers (shard, place, request_id, tenant, domain, tokens, tried, accepted, time_s, draft, prompt,"
    " prompt_tokens) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)


@dataclass(frozen=True)
class ShardRow:
    """One shard file as the manifest knows it."""

    id: int
    file: str
    sha256: str
    bytes: int
    newest_s: float
    fresh: bool  # not yet aged into the reservoir


class DraftedText(NamedTuple):
    """Answers of one domain that one draft drafted for, summed up."""

    domain: str
    draft: str  # version, "" for none
    answers: int
    tokens: int
    tried: int
    accepted: int


class Manifest:
    """Tables of the replay log in `folder`. Every method is one transaction.

    Raises:
        RunError: the file cannot be opened, or is no database.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._database = open_manifest(folder)

    def agree(self, key: LogKey | None) -> LogKey:
        """Return the recorded key. Record `key` if the log has none.

        Raises:
            ConfigError: `key` differs from the recorded one, or there is neither.
        """
        with self._database.transaction() as rows:
            row = rows.execute("SELECT value FROM facts WHERE name = 'key'").fetchone()
            if row is None:
                if key is None:
                    raise ConfigError(f"the log in {self.folder} is empty; a server with online=on fills it")
                rows.execute("INSERT INTO facts VALUES ('key', ?)", (json.dumps(asdict(key)),))
                return key
        recorded = LogKey(**json.loads(row[0]))
        if key is not None and key != recorded:
            name = next(name for name, value in asdict(key).items() if getattr(recorded, name) != value)
            raise ConfigError(
                f"the log in {self.folder} was recorded with another {name} ({getattr(recorded, name)}, not "
                f"{getattr(key, name)}); use another online.folder"
            )
        return recorded

    # -- answers ------------------------------------------------------------------------------------------------

    def entries(self, after: int, up_to: int | None, domains: Sequence[str] | None = None) -> list[LogEntry]:
        """Return the answers numbered above `after` and at most `up_to`, in order, of all domains or of some."""
        only, names = _among(domains)
        query = f"SELECT {ENTRY} FROM answers WHERE number > ? AND number <= ?{only} ORDER BY number"
        last = up_to if up_to is not None else 1 << 62
        return [LogEntry(*row) for row in self._database.rows(query, (after, last, *names))]

    def count(self, after: int, domains: Sequence[str] | None = None) -> int:
        """Count the answers numbered above `after`, of all domains or of some."""
        only, names = _among(domains)
        return int(self._database.value(COUNT + only, (after, *names)))

    def by_draft(self, after: int) -> list[DraftedText]:
        """Sum up the answers numbered above `after` by domain and draft."""
        query = f"SELECT {', '.join(SUMS)} FROM answers WHERE number > ? GROUP BY domain, draft"
        return [DraftedText(*row) for row in self._database.rows(query, (after,))]

    def newest_number(self) -> int:
        """Return the last number ever given, 0 for an empty log. Deleted answers count."""
        return self._database.value("SELECT seq FROM sqlite_sequence WHERE name = 'answers'") or 0

    def go_on_from(self, number: int) -> None:
        """Give numbers above `number` from now on, and above those of all answers."""
        with self._database.transaction() as rows:
            row = rows.execute("SELECT seq FROM sqlite_sequence WHERE name = 'answers'").fetchone()
            if row is None:
                rows.execute("INSERT INTO sqlite_sequence VALUES ('answers', ?)", (number,))
            elif row[0] < number:
                rows.execute("UPDATE sqlite_sequence SET seq = ? WHERE name = 'answers'", (number,))

    def newest_s(self) -> float:
        """Return the time of the newest answer, 0 for an empty log."""
        return self._database.value("SELECT MAX(time_s) FROM answers") or 0.0

    def places(self, shard: int) -> dict[int, int]:
        """Return number → place in the file, of a shard's listed answers in the order of their places."""
        rows = self._database.rows("SELECT number, place FROM answers WHERE shard = ? ORDER BY place", (shard,))
        return {row["number"]: row["place"] for row in rows}

    def tenants(self) -> dict[str, int]:
        """Return tenant → number of answers, most first."""
        rows = self._database.rows("SELECT tenant, COUNT(*) n FROM answers GROUP BY tenant ORDER BY n DESC")
        return {row["tenant"]: row["n"] for row in rows}

    def sizes(self) -> dict[str, int]:
        """Return the totals described in `ReplayLog.sizes`."""
        totals = [dict(self._database.rows(query)[0]) for query in TOTALS]
        counters = {row["name"]: row["value"] for row in self._database.rows("SELECT * FROM counters")}
        return {name: value for sizes in (*totals, counters) for name, value in sizes.items()}

    # -- shards -------------------------------------------------------------------------------------------------

    def shards(self) -> list[ShardRow]:
        """Return all shards, oldest first."""
        rows = self._database.rows("SELECT * FROM shards ORDER BY id")
        return [ShardRow(**{**row, "fresh": bool(row["fresh"])}) for row in map(dict, rows)]

    def shard(self, shard: int) -> ShardRow | None:
        """Return one shard. None: retention or a deletion has removed it."""
        rows = self._database.rows("SELECT * FROM shards WHERE id = ?", (shard,))
        return ShardRow(**{**dict(rows[0]), "fresh": bool(rows[0]["fresh"])}) if rows else None

    def enter(self, file: str, sha256: str, size: int, answers: Sequence[LoggedAnswer]) -> None:
        """List a new shard and its answers."""
        with self._database.transaction() as rows:
            shard = rows.execute(
                "INSERT INTO shards (file, sha256, bytes, newest_s) VALUES (?, ?, ?, ?)",
                (file, sha256, size, max(a.time_s for a in answers)),
            ).lastrowid
            for place, answer in enumerate(answers):
                _list(rows, shard, place, answer)

    def replace(self, shard: int, file: str, sha256: str, size: int, kept: Sequence[int]) -> None:
        """Point a shard at a rewritten file that holds the answers of the old places `kept`."""
        with self._database.transaction() as rows:
            rows.execute("UPDATE shards SET file = ?, sha256 = ?, bytes = ? WHERE id = ?", (file, sha256, size, shard))
            rows.executemany(
                "UPDATE answers SET place = ? WHERE shard = ? AND place = ?",
                [(new, shard, place) for new, place in enumerate(kept)],
            )

    def remove(self, shards: Sequence[int]) -> list[str]:
        """Remove shards with their answers from the lists. Return their files."""
        marks = ", ".join("?" * len(shards))
        files = self._database.rows(f"SELECT file FROM shards WHERE id IN ({marks})", shards)
        with self._database.transaction() as rows:
            rows.execute(f"DELETE FROM shards WHERE id IN ({marks})", shards)
        return [row["file"] for row in files]

    def keep(self, shard: int) -> None:
        """Move a shard from the fresh ones into the reservoir."""
        with self._database.transaction() as rows:
            rows.execute("UPDATE shards SET fresh = 0 WHERE id = ?", (shard,))

    # -- deletions ----------------------------------------------------------------------------------------------

    def exclude(self, tenant: str, excluded: bool) -> None:
        """Keep a tenant's answers out from now on, or no longer."""
        with self._database.transaction() as rows:
            rows.execute("DELETE FROM excluded WHERE tenant = ?", (tenant,))
            if excluded:
                rows.execute("INSERT INTO excluded VALUES (?)", (tenant,))

    def excluded(self) -> set[str]:
        """Return the tenants whose answers are kept out."""
        return {row["tenant"] for row in self._database.rows("SELECT tenant FROM excluded")}

    def deleted_at(self) -> dict[str, float]:
        """Return tenant → time of its last deletion."""
        return {row["tenant"]: row["time_s"] for row in self._database.rows("SELECT * FROM deletions")}

    def delete(self, tenant: str, now_s: float) -> tuple[int, float]:
        """Take a tenant's answers off the list and mark their shards and exports for rewriting.

        Returns:
            How many answers were listed, and the time of the deletion: `now_s`, or that of the tenant's newest answer
            where the clock of this process is behind the writer's.
        """
        with self._database.transaction() as rows:
            newest = rows.execute("SELECT MAX(time_s) FROM answers WHERE tenant = ?", (tenant,)).fetchone()[0]
            time_s = max(now_s, newest or 0.0)
            rows.execute("INSERT OR REPLACE INTO deletions VALUES (?, ?)", (tenant, time_s))
            rows.execute(
                "INSERT OR IGNORE INTO rewrites SELECT DISTINCT shard FROM answers WHERE tenant = ?", (tenant,)
            )
            rows.execute("UPDATE exports SET deleted = 1 WHERE tenant = ?", (tenant,))
            return rows.execute("DELETE FROM answers WHERE tenant = ?", (tenant,)).rowcount, time_s

    def rewrites(self) -> list[int]:
        """Return the shards whose files still hold deleted answers."""
        return [row["shard"] for row in self._database.rows("SELECT shard FROM rewrites")]

    def finish_rewrites(self) -> None:
        """Erase deleted rows from the database file and clear the list of rewrites.

        Raises:
            RunError: another process keeps reading the old rows.
        """
        self._database.scrub()
        with self._database.transaction() as rows:
            rows.execute("DELETE FROM rewrites")

    # -- exports ------------------------------------------------------------------------------------------------

    def list_export(self, path: str, tenants: Iterable[str]) -> None:
        """List a file that holds answers of these tenants, in place of what was known of it."""
        with self._database.transaction() as rows:
            rows.execute("DELETE FROM exports WHERE path = ?", (path,))
            rows.executemany("INSERT INTO exports (path, tenant) VALUES (?, ?)", [(path, name) for name in tenants])

    def exports_to_clean(self) -> dict[str, set[str]]:
        """Return file → deleted tenants whose answers it still holds."""
        deleted_in: dict[str, set[str]] = {}
        for row in self._database.rows("SELECT path, tenant FROM exports WHERE deleted"):
            deleted_in.setdefault(row["path"], set()).add(row["tenant"])
        return deleted_in

    def forget_deleted_in(self, path: str) -> None:
        """Note that a file holds no answer of a deleted tenant any more."""
        with self._database.transaction() as rows:
            rows.execute("DELETE FROM exports WHERE path = ? AND deleted", (path,))

    # -- counters -----------------------------------------------------------------------------------------------

    def add(self, name: str, more: int) -> int:
        """Add to a persistent counter and return its new value. Adding 0 does nothing and returns 0."""
        if more == 0:
            return 0
        with self._database.transaction() as rows:
            rows.execute(
                "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
                (name, more),
            )
            return int(rows.execute("SELECT value FROM counters WHERE name = ?", (name,)).fetchone()[0])

    def add_refusal(self, file: str, reason: str) -> None:
        """Count a refused file once for all processes. On a full disk it stays uncounted."""
        with suppress(DatabaseFailed), self._database.transaction() as rows:
            rows.execute("INSERT OR IGNORE INTO refusals VALUES (?, ?)", (file, reason))

    def close(self) -> None:
        self._database.close()


def _among(domains: Sequence[str] | None) -> tuple[str, Sequence[str]]:
    """Return the condition on a domain, and its values."""
    return ("", ()) if domains is None else (f" AND domain IN ({', '.join('?' * len(domains))})", domains)


def _list(rows: sqlite3.Connection, shard: int | None, place: int, answer: LoggedAnswer) -> None:
    """List one answer, in its conversation."""
    conversation = conversation_of(rows, answer.tenant, answer.prompt_ids)
    number = rows.execute(
        ANSWER,
        (
            shard,
            place,
            answer.request_id,
            answer.tenant,
            answer.domain,
            len(answer),
            answer.tried,
            answer.accepted,
            answer.time_s,
            answer.draft,
            prompt_hash(answer.tenant, answer.prompt_ids),
            len(answer.prompt_ids),
        ),
    ).lastrowid
    rows.execute("UPDATE answers SET conversation = ? WHERE number = ?", (conversation or number, number))
