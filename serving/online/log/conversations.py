"""Conversations of a tenant: a prompt that repeats or continues an earlier one belongs to the same conversation.

Answers of a conversation resemble each other, so they are evidence as a whole, and what was learnt from one of them
tells of the others.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any

import numpy

SHORTEST = 8  # tokens of a prompt that others may go on from. Shorter ones begin many texts


def prompt_hash(tenant: str, prompt_ids: Sequence[int]) -> str:
    """Return a hash of a tenant's prompt."""
    return _prefix_hashes(tenant, prompt_ids, [len(prompt_ids)])[0]


def conversation_of(rows: sqlite3.Connection, tenant: str, prompt_ids: Sequence[int]) -> int | None:
    """Return the conversation that a prompt belongs to: of the longest earlier prompt that it begins with, or is.

    Args:
        rows: the manifest, in a transaction.
    """
    size = len(prompt_ids)
    known = rows.execute(
        "SELECT DISTINCT prompt_tokens FROM answers WHERE tenant = ? AND prompt_tokens BETWEEN ? AND ?",
        (tenant, min(SHORTEST, size), size),
    )
    lengths = sorted({length for (length,) in known if length >= SHORTEST or length == size})
    for prefix_hash in reversed(_prefix_hashes(tenant, prompt_ids, lengths)):
        query = "SELECT conversation FROM answers WHERE tenant = ? AND prompt = ? LIMIT 1"
        row: Any = rows.execute(query, (tenant, prefix_hash)).fetchone()
        if row is not None:
            return int(row[0])
    return None


def _prefix_hashes(tenant: str, prompt_ids: Sequence[int], lengths: Iterable[int]) -> list[str]:
    """Return the hashes of the first `lengths` tokens, lengths in ascending order."""
    content = numpy.asarray(prompt_ids, dtype=numpy.int32)
    digest, read, hashes = hashlib.sha256(tenant.encode()), 0, []
    for length in lengths:
        digest.update(content[read:length].tobytes())
        read = length
        hashes.append(digest.hexdigest()[:32])
    return hashes
