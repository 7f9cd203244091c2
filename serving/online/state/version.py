"""Records of the version registry: a draft version, and its acceptance in service."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distillspec.types import short_hash

ONLY = ""  # the draft of a server that has one


@dataclass(frozen=True)
class Version:
    """One version of a draft.

    `first_request` to `last_request` are the numbers of the logged answers it learnt from.
    """

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
    member: str = ONLY  # the draft of a pool that it is a version of

    @property
    def served_as(self) -> str:
        """The engine's name for it: the start of its weights' hash."""
        return short_hash(self.weights_hash)


@dataclass(frozen=True)
class ServedRecord:
    """Acceptance of a version in service, kept for comparisons after a restart."""

    version: str  # `Version.served_as`
    totals: dict[str, int]  # requests, tried, accepted
    recent: list[list[Any]]  # the newest requests: domain, tried, accepted
