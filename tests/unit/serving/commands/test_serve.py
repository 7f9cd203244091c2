"""The engine that `distill serve` builds, and what it refuses before it loads a model."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import DraftConfig, EngineConfig, OnlineConfig, ServeCommand, ServerConfig, TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.models.checkpoint import METADATA
from distillspec.serving.base.tree import DRAFT, NGRAM
from distillspec.serving.commands.serve import load_engine, run
from distillspec.serving.cost_keeper import CostKeeper
from distillspec.serving.costs.fitted import Fitted
from distillspec.serving.costs.hardware_profile import ModelKey, PassKey, Profile, ProfiledDraft, machine, size_of
from distillspec.serving.costs.known import known_costs
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.engine import Engine
from distillspec.serving.online.adaptation import Adaptation
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.proposers.base import versions_of
from distillspec.serving.proposers.side_by_side import SideBySide
from distillspec.serving.server.http.keys import ADMIN_KEY, API_KEYS


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
    make: Callable[..., Engine], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = make("decoupled", measure_costs_s=0)
    assert first.costs is None
    # Steps of a minute: whatever a machine measures, however busy it is, is far less.
    costs = LatencyModel(CostTable.line(1e-7, 1.0, 50.0), CostTable.line(1e-8, 0.1, 7.0))
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
    monkeypatch.setattr("distillspec.serving.start_costs.MOST_RUNS", 1)  # each is timed, and no budget ends that
    other = make("decoupled", pack_weights=False, measure_costs_s=600)  # other passes are measured anew
    assert other.costs is not None
    assert other.costs.step_s(*step) < 0.5 * costs.step_s(*step)
    other.close()


def test_a_plain_server_goes_on_with_the_costs_kept_beside_its_profile(
    make: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make("off", measure_costs_s=0, compile=False)
    assert first.draft is not None
    table = CostTable.line(1e-7, 1e-3, 5e-2)
    cost = Fitted(table, 0.0, ())
    drafts = {DRAFT: ProfiledDraft("draft", size_of(first.draft), cost)}
    key = machine(first.target.device), PassKey.of(first.settings), ModelKey.of(first.target)
    Profile(*key, cost, drafts).save(tmp_path / "profile" / "profile.json")
    first.close()
    for named in ("profile", "profile/profile.json"):
        profiled = make("off", compile=False, profile=str(tmp_path / named))
        assert profiled.costs is not None
        assert profiled.costs.target == table
        refined = LatencyModel(table.scaled(3.0), table.scaled(0.5))
        profiled.use_costs(refined)
        with CostKeeper(profiled, tmp_path / "profile" / "costs.json"):
            pass
        profiled.close()
        with caplog.at_level(logging.INFO):
            second = make("off", compile=False, profile=str(tmp_path / named))
        assert "costs of steps as kept in" in caplog.text
        assert second.costs is not None
        assert second.costs.target == refined.target
        assert known_costs(second.controller).target == refined.target  # type: ignore[union-attr]
        second.close()
        (tmp_path / "profile" / "costs.json").unlink()


@pytest.mark.parametrize(
    ("setting", "keys", "problem"),
    [
        ({"drafts_folder": "/nope"}, (), "server.drafts_folder=/nope is not a folder"),
        ({"tracing": True}, (), "server.tracing=true needs OpenTelemetry"),
        ({}, (API_KEYS, ADMIN_KEY), "the admin key is an API key too"),
    ],
)
def test_a_mistake_is_refused_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: dict[str, Any], keys: Sequence[str], problem: str
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "opentelemetry" else find_spec(name))
    for name in keys:
        monkeypatch.setenv(name, "one-and-the-same")
    target = TargetConfig(path=str(tmp_path / "not-looked-for"))
    with pytest.raises(ConfigError, match=problem):
        run(ServeCommand(target=target, server=ServerConfig(port=0, **setting)), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("proposer", "problem"),
    [
        (["maths", "sql"], r"proposer=sql is not known; use one of none, .*, or a draft: maths, chat$"),
        (["ngram", "chat"], r"proposer=\['ngram', 'chat'\] does not name the draft maths"),
    ],
)
def test_drafts_are_named_as_they_are_there_before_a_model_is_loaded(
    tmp_path: Path, proposer: list[str], problem: str
) -> None:
    for name in ("maths", "chat"):
        (tmp_path / name).mkdir()
        (tmp_path / name / METADATA).write_text("{}")
    drafts, target = [str(tmp_path / "maths"), str(tmp_path / "chat")], TargetConfig(path=str(tmp_path / "nowhere"))
    config = ServeCommand(
        target=target, drafts=drafts, engine=EngineConfig(proposer=proposer), server=ServerConfig(port=0)
    )
    with pytest.raises(ConfigError, match=problem):
        run(config, tmp_path / "run")
