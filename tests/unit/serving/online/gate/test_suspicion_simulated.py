"""Promoted versions with synthetic acceptance, from suspicion to rollback or acquittal, as in the benchmark."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).parents[5] / "benchmarks"


@pytest.fixture
def service(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/simulated_service.py`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("simulated_service")


def test_equal_drafts_are_suspected_and_acquitted(service: ModuleType, tmp_path: Path) -> None:
    lives = [service.life(tmp_path / str(seed), seed, gain=0.0, wander=0.05, requests=500) for seed in range(4)]
    assert sum(each.rolled_back for each in lives) == 0
    assert sum(each.acquittals for each in lives) > 0
    assert max(each.suspicions for each in lives) > 1, "it is suspected again"


def test_a_draft_that_lost_a_twentieth_is_taken_back_within_300_requests(service: ModuleType, tmp_path: Path) -> None:
    lives = [service.life(tmp_path / str(seed), seed, gain=-0.05, wander=0.03, requests=300) for seed in range(8)]
    assert sum(each.rolled_back for each in lives) == len(lives)
