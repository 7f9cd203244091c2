"""Passes that are recorded are priced at the numbers of tokens that they compute, and others at their own."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.config.engine import EngineConfig
from distillspec.models import LanguageModel
from distillspec.serving import Engine, EngineSettings
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.ladder import UNRECORDED, Ladder, Recorded
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.pass_recording import choose_recorder, recorded_tokens

from .execution.test_graphs import FakeRecorder

SETTINGS: dict[str, Any] = {"max_slots": 7, "max_model_len": 128, "speculation_length": 4, "controller": "goodput"}
COSTS = LatencyModel(CostTable.line(0.0, 1e-3, 1e-2), CostTable.line(0.0, 1e-4, 1e-3))


def test_only_chains_are_priced_as_recorded() -> None:
    settings = EngineConfig(**SETTINGS, tree="off")
    assert recorded_tokens(settings, FakeRecorder()) == Recorded.of(7, 4)
    assert recorded_tokens(settings, FakeRecorder(), FixedLength(9)) == Recorded.of(7, 9)
    assert recorded_tokens(settings, None) == UNRECORDED
    assert recorded_tokens(EngineConfig(**SETTINGS, tree="topk"), FakeRecorder()) == UNRECORDED


def test_cpus_record_nothing(target: LanguageModel) -> None:
    assert choose_recorder(EngineConfig(), target) is None


def engine_with(target: LanguageModel, recorder: FakeRecorder | None, **settings: Any) -> Engine:
    own = {**SETTINGS, "tree": "off", "compile": False, "proposer": "prompt_lookup", "measure_costs_s": 0.2, **settings}
    return Engine(target, None, EngineSettings(**own), recorder=recorder)


def test_an_engine_measures_and_prices_what_its_recorded_passes_compute(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """33 tokens run as 40."""
    # Each pass is timed once. No pause of this machine leaves one out.
    monkeypatch.setattr("distillspec.serving.start_costs.MOST_RUNS", 1)
    engine = engine_with(target, FakeRecorder(), measure_costs_s=600)
    assert engine.costs is not None
    assert engine.costs.target.recorded == Ladder.tokens(35)
    assert engine.timed_passes().verification(7, 3, 20).point.tokens == 28
    assert engine.timed_passes().verification(3, 2, 20).point.tokens == 10
    assert isinstance(engine.controller, GoodputController)
    engine.use_costs(COSTS)
    latency = engine.controller.latency
    assert latency.target.seconds(0, 33) == pytest.approx(COSTS.target.seconds(0, 40))
    assert latency.target.seconds(0, 300) == pytest.approx(COSTS.target.seconds(0, 300), rel=0.01)
    engine.close()


def test_an_engine_that_records_nothing_prices_what_it_reads(target: LanguageModel) -> None:
    class Broken(FakeRecorder):
        def record(self, run: Any) -> Any:
            raise RuntimeError("no graphs after all")

    for recorder in (None, Broken()):
        engine = engine_with(target, recorder)
        engine.use_costs(COSTS)
        assert engine.costs == COSTS
        engine.close()
