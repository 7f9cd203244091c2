"""The engine that `distill serve` builds."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import DraftConfig, EngineConfig, OnlineConfig, ServeCommand, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.serving.base.tree import DRAFT, NGRAM
from distillspec.serving.commands.serve import load_engine
from distillspec.serving.costs.known import known_costs
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.engine import Engine
from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.proposers.base import versions_of
from distillspec.serving.proposers.side_by_side import SideBySide


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Engine]:
    """Return a function that builds the server's engine, with one draft."""
    own = TargetConfig(path="tiny", dtype="float32", device="cpu")
    target = load_target(own)
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "draft", target)

    def build(mode: str, **engine: Any) -> Engine:
        online = OnlineConfig(mode=mode, folder=str(tmp_path / "online"))
        settings = EngineConfig(max_slots=2, max_model_len=64, **engine)
        config = ServeCommand(target=own, engine=settings, online=online)
        return load_engine(config, tmp_path / "draft", {}, None if mode == "off" else OnlineSettings.of(config))

    return build


@pytest.mark.parametrize("mode", ["off", "on", "decoupled"])
def test_ngrams_stand_beside_a_draft(make: Callable[..., Engine], mode: str) -> None:
    engine = make(mode, measure_costs_s=0)
    assert engine.proposer is not None
    assert list(versions_of(engine.proposer)) == [DRAFT]
    assert isinstance(engine.proposer, SideBySide)
    assert list(engine.proposer.proposers) == [NGRAM, DRAFT]
    engine.close()


def test_a_server_that_learns_goes_on_with_the_costs_of_the_one_before(
    make: Callable[..., Engine], tmp_path: Path
) -> None:
    first = make("decoupled", measure_costs_s=0)
    assert first.costs is None
    costs = LatencyModel(CostTable.line(1e-7, 1e-3, 5e-2), CostTable.line(1e-8, 1e-4, 7e-3))
    first.use_costs(costs)
    with Adaptation(first, OnlineSettings(OnlineConfig(mode="decoupled", folder=str(tmp_path / "online")))):
        pass
    first.close()
    second = make("decoupled")
    assert second.costs is not None
    step = [32, 32], [3, 1]
    assert second.costs.step_s(*step) == pytest.approx(costs.step_s(*step), rel=0.02)
    assert known_costs(second.controller) is not None
    assert known_costs(second.controller).step_s(*step) == pytest.approx(costs.step_s(*step), rel=0.02)  # type: ignore
    second.close()
    other = make("decoupled", pack_weights=False)  # other passes are measured anew
    assert other.costs is not None
    assert other.costs.step_s(*step) < 0.5 * costs.step_s(*step)
    other.close()
