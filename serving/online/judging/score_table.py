"""Table of scores, in the trainer's folder: the trainer writes it, the gate reads it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.state.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS scores (
    version TEXT NOT NULL, answer INTEGER NOT NULL, tokens TEXT NOT NULL, blocks TEXT NOT NULL, alpha REAL NOT NULL,
    positions INTEGER NOT NULL, PRIMARY KEY (version, answer)
);
CREATE TABLE IF NOT EXISTS problems (version TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shortages (version TEXT PRIMARY KEY, reason TEXT NOT NULL);
"""


class ScoreTable:
    """Scores by version and number of the logged answer. Numbers say nothing of a text."""

    def __init__(self, path: Path) -> None:
        self._database = Database(path, SCHEMA)

    def add(self, version: str, scores: Mapping[int, Score]) -> None:
        """Add scores of a version, by answer."""
        with self._database.transaction() as rows:
            rows.executemany(
                "INSERT OR REPLACE INTO scores VALUES (?, ?, ?, ?, ?, ?)",
                [
                    (version, answer, json.dumps(s.tokens), json.dumps(s.blocks), s.alpha, s.positions)
                    for answer, s in scores.items()
                ],
            )

    def of(self, version: str, after: int = 0) -> dict[int, Score]:
        """Return the scores of a version on answers numbered above `after`, by answer."""
        rows = self._database.rows("SELECT * FROM scores WHERE version = ? AND answer > ?", (version, after))
        return {
            row["answer"]: Score(
                tuple(json.loads(row["tokens"])), tuple(json.loads(row["blocks"])), row["alpha"], row["positions"]
            )
            for row in rows
        }

    def newest_answer(self) -> int:
        """Return the highest number of a scored answer, 0 without one."""
        return self._database.value("SELECT MAX(answer) FROM scores") or 0

    def refuse(self, version: str, reason: str) -> None:
        """Note why a version cannot be scored."""
        self._note("problems", version, reason)

    def problem(self, version: str) -> str | None:
        """Return why a version cannot be scored, None for no reason."""
        return self._noted("problems", version)

    def give_up(self, version: str, reason: str) -> None:
        """Note why a candidate is not scored, through no fault of its own."""
        self._note("shortages", version, reason)

    def shortage(self, version: str) -> str | None:
        """Return what `give_up` noted, None for nothing."""
        return self._noted("shortages", version)

    def changes(self) -> int:
        """Return a number that grows with every change by any process."""
        tables = ("scores", "problems", "shortages")
        return sum([int(self._database.value(f"SELECT COUNT(*) FROM {table}")) for table in tables])

    def keep_only(self, versions: Iterable[str]) -> None:
        """Drop the scores of all other versions."""
        kept = list(versions)
        marks = ", ".join("?" * len(kept))
        with self._database.transaction() as rows:
            rows.execute(f"DELETE FROM scores WHERE version NOT IN ({marks})", kept)

    def close(self) -> None:
        self._database.close()

    def _note(self, table: str, version: str, reason: str) -> None:
        with self._database.transaction() as rows:
            rows.execute(f"INSERT OR REPLACE INTO {table} VALUES (?, ?)", (version, reason))

    def _noted(self, table: str, version: str) -> str | None:
        reason: str | None = self._database.value(f"SELECT reason FROM {table} WHERE version = ?", (version,))
        return reason
