"""Tables of the version registry."""

from __future__ import annotations

from pathlib import Path

from distillspec.serving.online.state.database import Database
from distillspec.serving.online.state.layout import REGISTRY

SCHEMA = """
CREATE TABLE IF NOT EXISTS versions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, weights_hash TEXT NOT NULL, digest TEXT NOT NULL,
    parent TEXT, status TEXT NOT NULL, created_s REAL NOT NULL, first_request INTEGER, last_request INTEGER,
    metrics TEXT NOT NULL, verdict TEXT NOT NULL, reason TEXT NOT NULL, present INTEGER NOT NULL DEFAULT 1,
    member TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS promotions (
    id INTEGER PRIMARY KEY AUTOINCREMENT, version TEXT NOT NULL, previous TEXT, reason TEXT NOT NULL,
    time_s REAL NOT NULL, member TEXT NOT NULL DEFAULT ''
);
CREATE TABLE IF NOT EXISTS served (version TEXT PRIMARY KEY, totals TEXT NOT NULL, seen TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS members (
    id INTEGER PRIMARY KEY AUTOINCREMENT, name TEXT UNIQUE NOT NULL, status TEXT NOT NULL, domain TEXT,
    cloned_from TEXT, reason TEXT NOT NULL
)
"""
# Of a registry of one draft alone.
UPGRADE = "ALTER TABLE {} ADD COLUMN member TEXT NOT NULL DEFAULT ''"
CURRENT = "SELECT version FROM promotions WHERE member = ? ORDER BY id DESC LIMIT 1"


def open_registry(folder: Path) -> Database:
    """Open the registry in `folder`, made if there is none.

    Raises:
        RunError: it cannot be made or opened.
    """
    database = Database(folder / REGISTRY, SCHEMA)
    with database.transaction() as rows:
        for table in ("versions", "promotions"):
            if "member" not in {row[1] for row in rows.execute(f"PRAGMA table_info({table})")}:
                rows.execute(UPGRADE.format(table))
    return database
