"""Pools of two drafts: their registry, and answers that they drafted for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from distillspec.models import LanguageModel
from distillspec.serving.online.bootstrap import first_drafts
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from ..conftest import Answer


@pytest.fixture
def pooled(settings: OnlineSettings, target: LanguageModel, folders: dict[str, Path]) -> VersionRegistry:
    """Return the registry of a pool that has been started once."""
    first_drafts(settings, target, folders)
    return VersionRegistry(settings.layout.versions)


Drafted = Callable[..., list[LoggedAnswer]]


@pytest.fixture
def drafted(answer: Answer, pooled: VersionRegistry) -> Drafted:
    """`drafted("maths", "sums", 70, accepted=0.5)`: answers of a domain that a draft drafted for."""

    def make(draft: str, domain: str, count: int, accepted: float = 0.5, first: int = 0) -> list[LoggedAnswer]:
        current = pooled.of(draft).current()
        assert current is not None
        outcomes = torch.tensor([int(place >= 20 * accepted) for place in range(20)], dtype=torch.uint8)
        own = {"domain": domain, "draft_versions": (current.served_as,), "outcomes": outcomes}
        return [answer(f"{domain}{first + number}", **own) for number in range(count)]

    return make


def domains_of(entries: Sequence[object]) -> set[str]:
    return {entry.domain for entry in entries}  # type: ignore[attr-defined]
