"""Layers in few launches are used where they are right and faster. On CPUs Triton's interpreter runs them."""

from __future__ import annotations

import importlib.util
import logging
import os
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.fused_layers import FusedLayers
from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_cache import SlotCache
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.execution import fused_trial as module
from distillspec.serving.execution.fused_trial import faster, working
from distillspec.serving.execution.prepared import PreparedModel

from ..conftest import hf_greedy
from .test_graphs import FakeRecorder

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or "TRITON_INTERPRET" not in os.environ, reason="needs the interpreter"
)


@pytest.fixture
def model(random_model: Callable[..., LanguageModel]) -> LanguageModel:
    shared = random_model("llama", layers=2)
    return replace(shared, model=deepcopy(shared.model))


def cache() -> SlotCache:
    return SlotCache(3, 64, ragged_attention)


@pytest.mark.parametrize(("times", "used"), [(0.5, True), (2.0, False)])
def test_the_faster_ones_are_used_and_the_log_says_so(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, times: float, used: bool
) -> None:
    monkeypatch.setattr(module, "REPEATS", 1)
    ticks = iter([0.0, 1.0, 1.0, 2.0, 2.0, 3.0, 3.0, 3.0 + times])
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: next(ticks)))
    caplog.set_level(logging.INFO)
    fused = FusedLayers(model)
    assert (faster(model, fused, cache(), FakeRecorder()) is fused) == used
    assert f"take {times:.2f} of transformers' own time" in caplog.text


def test_right_ones_are_used_over_caches_that_their_attention_reads(model: LanguageModel) -> None:
    fused = FusedLayers(model)
    assert working(model, fused, cache()) is fused
    assert working(model, fused, SlotCache(3, 64)) is None


def test_wrong_ones_are_not_used(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that are wrong behind a text alone, too."""
    right = FusedLayers.hidden
    monkeypatch.setattr(
        FusedLayers, "hidden", lambda *given: right(*given).roll(int(len(given[2][0]) == module.ROWS), 0)
    )
    assert working(model, FusedLayers(model), cache()) is None
    assert "layers run as transformers launches them (they are off by" in caplog.text


def test_a_compiler_that_fails_ends_nothing(
    model: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> torch.Tensor:
        raise RuntimeError("no such instruction")

    monkeypatch.setattr(FusedLayers, "hidden", fail)
    assert working(model, FusedLayers(model), cache()) is None
    assert "(no such instruction)" in caplog.text


@pytest.mark.usefixtures("no_kernel_trial")
def test_an_engine_on_them_writes_the_same_text(model: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA: passes and loops are recorded, and their layers run in few launches."""
    asked = [[7, 30, 200, 41], [90, 14]]
    wanted = [hf_greedy(model, prompt, 5) for prompt in asked]
    draft = initialise_draft(DraftConfig(layers=1), model)
    right, seen = FusedLayers.hidden, set[int]()

    def noted(own: FusedLayers, *given: object) -> torch.Tensor:
        seen.add(len(own.model.layers))
        return right(own, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FusedLayers, "hidden", noted)
    monkeypatch.setattr("distillspec.serving.execution.prepared.may_fuse", lambda *_: True)
    monkeypatch.setattr("distillspec.serving.execution.runner.CudaRecorder", FakeRecorder)
    monkeypatch.setattr("distillspec.serving.execution.runner.faster", lambda model, own, *_: own)
    settings = EngineSettings(
        max_slots=1, max_model_len=64, controller="fixed", speculation_length=1, attention="triton", pack_weights=False
    )
    engine = Engine(model, draft, settings, recorder=FakeRecorder())
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=5))
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert seen == {2, 1}, "target and draft"


def test_cpus_have_layers_of_their_own(model: LanguageModel) -> None:
    assert PreparedModel(model, pack_weights=False, compile=False).fused is None
