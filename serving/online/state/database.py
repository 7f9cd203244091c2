"""SQLite database with a write-ahead log, one writer at a time, and deleted rows overwritten."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

from distillspec.errors import RunError, in_one_line
from distillspec.files import clear_disk_errors, private_file, private_folder

PATIENCE_S = 30.0  # to wait for another process's transaction


class DatabaseFailed(RunError):
    """SQLite cannot read or write: the disk is full, the file is damaged, or others hold it for too long."""


class Database:
    """One database file. Any thread may use it, and several processes may have it open.

    Every method may raise `DatabaseFailed`.

    Args:
        schema: `CREATE … IF NOT EXISTS` statements.

    Raises:
        RunError: it cannot be made or opened, or is no database.
    """

    def __init__(self, path: Path, schema: str) -> None:
        self.path = path
        self._lock = RLock()
        try:
            with clear_disk_errors(path):
                self._open(schema)
        except (OSError, sqlite3.Error) as error:
            raise RunError(f"cannot open {path}: {getattr(error, 'strerror', None) or error}") from error

    def _open(self, schema: str) -> None:
        private_folder(self.path.parent)
        private_file(self.path)  # the write-ahead log takes its permissions from it
        self._connection = sqlite3.connect(self.path, timeout=PATIENCE_S, isolation_level=None, check_same_thread=False)
        self._connection.row_factory = sqlite3.Row
        for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=ON", "foreign_keys=ON"):
            self._connection.execute(f"PRAGMA {pragma}").fetchall()
        for statement in filter(str.strip, schema.split(";")):
            self._connection.execute(statement)

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run the block as one transaction. Other writers, of this process or another, wait for its end."""
        with self._lock, self._clear_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield self._connection
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:  # SQLite may have rolled back already, on a full disk above all
                    self._connection.execute("ROLLBACK")
                raise

    def rows(self, query: str, arguments: Sequence[Any] = ()) -> list[sqlite3.Row]:
        """Return the rows of a SELECT."""
        with self._lock, self._clear_errors():
            return self._connection.execute(query, arguments).fetchall()

    def value(self, query: str, arguments: Sequence[Any] = ()) -> Any:
        """Return the first column of the first row. None: no rows."""
        rows = self.rows(query, arguments)
        return rows[0][0] if rows else None

    def scrub(self) -> None:
        """Erase deleted rows from the file and from its write-ahead log.

        Raises:
            RunError: another process keeps reading the old rows. They are still in the write-ahead log.
        """
        with self._lock, self._clear_errors():
            self._connection.execute("VACUUM")
            busy = self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0]
        if busy:
            raise RunError(
                f"deleted rows are still in {self.path}-wal: another process has been reading for {PATIENCE_S:g} s; "
                "end it and delete again"
            )

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _clear_errors(self) -> Iterator[None]:
        """Turn an SQLite error into one line that names the file. Other errors of the block pass."""
        try:
            yield
        except sqlite3.Error as error:
            raise DatabaseFailed(f"cannot read or write {self.path}: {in_one_line(error)}") from error
