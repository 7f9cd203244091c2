"""Tables of the replay log's manifest."""

from __future__ import annotations

from pathlib import Path

from distillspec.serving.online.state.database import Database
from distillspec.serving.online.state.layout import MANIFEST

SCHEMA = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS shards (
    id INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT UNIQUE NOT NULL, sha256 TEXT NOT NULL, bytes INTEGER NOT NULL,
    newest_s REAL NOT NULL, fresh INTEGER NOT NULL DEFAULT 1
);
CREATE TABLE IF NOT EXISTS answers (
    number INTEGER PRIMARY KEY AUTOINCREMENT, shard INTEGER NOT NULL REFERENCES shards(id) ON DELETE CASCADE,
    place INTEGER NOT NULL, request_id TEXT NOT NULL, tenant TEXT NOT NULL, domain TEXT NOT NULL,
    tokens INTEGER NOT NULL, tried INTEGER NOT NULL, accepted INTEGER NOT NULL, time_s REAL NOT NULL,
    conversation INTEGER NOT NULL DEFAULT 0, prompt TEXT NOT NULL DEFAULT '', prompt_tokens INTEGER NOT NULL DEFAULT 0,
    draft TEXT NOT NULL DEFAULT ''
);
CREATE INDEX IF NOT EXISTS answers_of_shard ON answers (shard);
CREATE TABLE IF NOT EXISTS deletions (tenant TEXT PRIMARY KEY, time_s REAL NOT NULL);
CREATE TABLE IF NOT EXISTS excluded (tenant TEXT PRIMARY KEY);
CREATE TABLE IF NOT EXISTS exports (
    path TEXT NOT NULL, tenant TEXT NOT NULL, deleted INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (path, tenant)
);
CREATE TABLE IF NOT EXISTS rewrites (shard INTEGER PRIMARY KEY);
CREATE TABLE IF NOT EXISTS refusals (file TEXT PRIMARY KEY, reason TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL)
"""
BY_PROMPT = "CREATE INDEX IF NOT EXISTS answers_of_prompt ON answers (tenant, prompt_tokens, prompt)"
# Of a log that kept answers apart for the gate. Now all answers are judged by, and then learnt from.
UPGRADE = (
    "ALTER TABLE answers ADD COLUMN conversation INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE answers ADD COLUMN prompt TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE answers ADD COLUMN prompt_tokens INTEGER NOT NULL DEFAULT 0",
    "UPDATE answers SET conversation = number",
    "ALTER TABLE answers DROP COLUMN split",
)
# Of a log of one draft alone.
OF_DRAFT = "ALTER TABLE answers ADD COLUMN draft TEXT NOT NULL DEFAULT ''"


def open_manifest(folder: Path) -> Database:
    """Open the manifest in `folder`, made if there is none.

    Raises:
        RunError: it cannot be opened, or is no database.
    """
    database = Database(folder / MANIFEST, SCHEMA)
    with database.transaction() as rows:
        known = {row[1] for row in rows.execute("PRAGMA table_info(answers)")}
        statements = [*UPGRADE] if "split" in known else []
        statements += [] if "draft" in known else [OF_DRAFT]
        for statement in [*statements, BY_PROMPT]:
            rows.execute(statement)
    return database
