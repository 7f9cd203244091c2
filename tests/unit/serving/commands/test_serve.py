"""The engine that `distill serve` builds."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.config import DraftConfig, EngineConfig, OnlineConfig, ServeCommand, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.serving.base.tree import DRAFT, NGRAM
from distillspec.serving.commands.serve import load_engine
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.proposers.base import versions_of
from distillspec.serving.proposers.side_by_side import SideBySide


@pytest.mark.parametrize(("mode", "beside"), [("off", True), ("on", False), ("decoupled", False)])
def test_ngrams_stand_beside_a_draft_that_does_not_learn(tmp_path: Path, mode: str, beside: bool) -> None:
    """What n-grams displace is seldom tried, and a broken version would never be suspected."""
    own = TargetConfig(path="tiny", dtype="float32", device="cpu")
    target = load_target(own)
    save_draft(initialise_draft(DraftConfig(layers=1), target), tmp_path / "draft", target)
    config = ServeCommand(
        target=own,
        engine=EngineConfig(max_slots=2, max_model_len=64, measure_costs_s=0),
        online=OnlineConfig(mode=mode, folder=str(tmp_path / "online")),
    )
    online = None if mode == "off" else OnlineSettings.of(config)
    engine = load_engine(config, tmp_path / "draft", {}, online)
    assert engine.proposer is not None
    assert list(versions_of(engine.proposer)) == [DRAFT]
    assert isinstance(engine.proposer, SideBySide) == beside
    if isinstance(engine.proposer, SideBySide):
        assert list(engine.proposer.proposers) == [NGRAM, DRAFT]
    engine.close()
