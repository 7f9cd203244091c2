"""A transaction is whole or not there, and what SQLite cannot do is told in one line that names the file."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from distillspec.errors import RunError
from distillspec.serving.online.state.database import Database

SCHEMA = """
CREATE TABLE IF NOT EXISTS words (word TEXT UNIQUE);
CREATE TABLE IF NOT EXISTS pairs (word TEXT REFERENCES words (word) DEFERRABLE INITIALLY DEFERRED)
"""


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Database]:
    """Return a database that does not wait for others."""
    monkeypatch.setattr("distillspec.serving.online.state.database.PATIENCE_S", 0.0)
    made = Database(tmp_path / "words.sqlite", SCHEMA)
    yield made
    made.close()


def add(database: Database, word: str = "a", table: str = "words") -> None:
    with database.transaction() as rows:
        rows.execute(f"INSERT INTO {table} VALUES (?)", (word,))


def words(database: Database) -> list[str]:
    return [row["word"] for row in database.rows("SELECT word FROM words")]


@pytest.mark.parametrize("work", [add, Database.scrub])
def test_a_file_that_another_process_holds(database: Database, work: Callable[[Database], None]) -> None:
    with closing(sqlite3.connect(database.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(RunError, match=r"words\.sqlite: database is locked$"):
            work(database)
        other.execute("ROLLBACK")
    work(database)


def test_a_full_disk_costs_one_transaction(database: Database) -> None:
    database.value("PRAGMA max_page_count = 1")  # what it has stays
    with pytest.raises(RunError, match=r"words\.sqlite: database or disk is full$"):
        add(database, "x" * 100_000)
    database.value("PRAGMA max_page_count = 1000")
    add(database)
    assert words(database) == ["a"]


def test_the_cause_is_told_where_sqlite_has_rolled_back_by_itself(database: Database) -> None:
    with database.transaction() as rows:
        rows.execute("CREATE TRIGGER refuse BEFORE INSERT ON words BEGIN SELECT RAISE(ROLLBACK, 'no room'); END")
    with pytest.raises(RunError, match=r"words\.sqlite: no room$"):
        add(database)
    with database.transaction() as rows:
        rows.execute("DROP TRIGGER refuse")
    add(database)
    assert words(database) == ["a"]


def test_a_transaction_that_cannot_end_leaves_nothing_open(database: Database) -> None:
    with pytest.raises(RunError, match=r"words\.sqlite: FOREIGN KEY constraint failed$"):
        add(database, "unknown", "pairs")  # found at its end
    add(database)
    assert words(database) == ["a"]
    assert database.rows("SELECT * FROM pairs") == []


def test_rows_that_cannot_be_read(database: Database) -> None:
    with pytest.raises(RunError, match=r"words\.sqlite: no such table: unknown$"):
        database.rows("SELECT * FROM unknown")


def test_other_errors_undo_a_transaction_and_pass(database: Database) -> None:
    def broken() -> None:
        with database.transaction() as rows:
            rows.execute("INSERT INTO words VALUES ('a')")
            raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        broken()
    assert words(database) == []
