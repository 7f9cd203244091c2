"""Members of a pool: drafts by their folders, and sources without a model by the names of their proposers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from distillspec.config.checks import require
from distillspec.config.engine import EngineConfig
from distillspec.config.registry import DRAFT_ALONE, PROPOSERS

T = TypeVar("T")

MEMBERS = tuple([name for name, choice in PROPOSERS.items() if not choice.alone and "draft" not in choice.needs])


def with_members(drafts: Sequence[T], engine: EngineConfig) -> tuple[list[T], EngineConfig]:
    """Return the folders in a list of drafts, and the engine's settings with the proposers that the list names too.

    `drafts=[A,B,suffix]` is `drafts=[A,B] engine.proposer=[suffix,draft_model]`. A folder of such a name is `./suffix`.

    Raises:
        ConfigError: the list names no draft, or a proposer twice, or `engine.proposer` stands alone.
    """
    names = [str(member) for member in drafts if member in MEMBERS]
    if not names:
        return list(drafts), engine
    folders = [member for member in drafts if member not in MEMBERS]
    listed = ", ".join(names)
    require(bool(folders), f"drafts=[{listed}] names no draft; use engine.proposer={names[0]}")
    require(len(set(names)) == len(names), f"drafts=[…] names {listed}: each source without a model once")
    beside = [name for name in names if name not in engine.proposers]
    return folders, replace(engine, proposer=[*beside, *(engine.proposers or (DRAFT_ALONE,))])
