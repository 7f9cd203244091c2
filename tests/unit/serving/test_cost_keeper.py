"""Costs of steps are written at a server's end, and before."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from distillspec.models import LanguageModel
from distillspec.serving.cost_keeper import CostKeeper
from distillspec.serving.costs.kept_costs import cost_key, kept_costs
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.engine import Engine

from .conftest import MakeEngine

COSTS = LatencyModel(CostTable.line(1e-7, 1e-3, 5e-2), CostTable.line(1e-8, 1e-4, 7e-3))
SLOWER = LatencyModel(COSTS.target.scaled(2.0), COSTS.draft)


@pytest.fixture
def engine(make_engine: MakeEngine, draft: LanguageModel) -> Engine:
    engine = make_engine(draft, controller="goodput", compile=False)
    engine.use_costs(COSTS)
    return engine


def kept(engine: Engine, file: Path) -> LatencyModel | None:
    return kept_costs(file, cost_key(engine.target, engine.drafts, engine.settings))


def test_the_last_costs_are_kept_at_the_end(engine: Engine, tmp_path: Path) -> None:
    with CostKeeper(engine, tmp_path / "costs.json", every_s=1e6):
        engine.use_costs(SLOWER)
        assert not (tmp_path / "costs.json").exists()
    found = kept(engine, tmp_path / "costs.json")
    assert found is not None
    assert found.target == SLOWER.target


def test_costs_are_kept_meanwhile(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = threading.Event()
    keep = CostKeeper.keep

    def watched(keeper: CostKeeper) -> None:
        keep(keeper)
        written.set()

    monkeypatch.setattr(CostKeeper, "keep", watched)
    with CostKeeper(engine, tmp_path / "costs.json", every_s=0.001):
        assert written.wait(60)
        assert kept(engine, tmp_path / "costs.json") is not None


def test_guessed_costs_are_not_kept(make_engine: MakeEngine, draft: LanguageModel, tmp_path: Path) -> None:
    engine = make_engine(draft, controller="goodput", compile=False)
    with CostKeeper(engine, tmp_path / "costs.json"):
        assert engine.costs is None
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_ends_no_server(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with caplog.at_level(logging.ERROR), CostKeeper(engine, tmp_path / "file" / "costs.json"):
        pass
    assert "costs of steps are not kept in" in caplog.text
