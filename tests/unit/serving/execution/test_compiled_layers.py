"""Compiled layers give what plain layers give, serve any number of tokens, and never stop an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft, slot_attention
from distillspec.serving import Engine, EngineSettings, SamplingParams
from distillspec.serving.execution import compiled_layers, packed_linear
from distillspec.serving.execution.compiled_layers import CACHE_VARIABLE, CompiledLayers, can_compile
from distillspec.serving.execution.prepared import PreparedModel

from ..conftest import hf_greedy, prompts

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
needs_compiler = pytest.mark.skipif(not can_compile(), reason="needs a C++ compiler")


@pytest.fixture
def plain_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[..., Any]]]:
    """Replace the compiler by one that returns what it is given. Yields the functions that it was given."""
    made: list[Callable[..., Any]] = []

    def compiled(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        made.append(forward)

        def run(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(layer, *args, slot_view=slot_attention.passed_view(), **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    compiled_layers.forget_compiled()
    yield made
    compiled_layers.forget_compiled()


@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # the compiler's own affair
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_one_code_serves_all_layers_and_numbers_of_tokens_and_is_kept_on_disk(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")  # so that it is taken back afterwards, whatever it was
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(packed_linear, "packing_is_faster", lambda dtype, weights: True)
    monkeypatch.setattr(packed_linear, "SMALLEST", 1)
    compiled_layers.forget_compiled()
    wanted = [hf_greedy(target, prompt, 16) for prompt in prompts(3)]
    draft = initialise_draft(DraftConfig(layers=2), target)
    settings = EngineSettings(max_slots=2, max_model_len=256, controller="fixed", speculation_length=3, compile=True)
    torch._dynamo.utils.counters.clear()
    engine = Engine(target, draft, settings)
    layers = engine.runner.prepared.layers
    assert layers is not None
    assert layers.ready
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    outputs = engine.generate(prompts(3), GREEDY)
    assert layers.ready, "no compiled call failed"
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert made <= 4, "one token and more, for the target's and the draft's layers"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made, "nothing is compiled while serving"
    assert Path(os.environ[CACHE_VARIABLE]) == tmp_path / "distillspec" / "compiled"
    assert ".so" in {path.suffix for path in tmp_path.rglob("*") if path.is_file()}, "the compiled code itself"
    assert all("forward" not in layer.__dict__ for layer in target.layers)
    compiled_layers.forget_compiled()


def test_layers_are_compiled_in_the_background_once_it_pays(
    target: LanguageModel, plain_compiler: list[Callable[..., Any]]
) -> None:
    prepared = PreparedModel(target, pack_weights=False, compile=False)
    layers = CompiledLayers(target, after_s=10.0)
    layers.spent(9.0)
    assert not layers.ready
    assert not plain_compiler
    before = threading.active_count()
    layers.spent(1.5)
    layers.join()
    assert layers.ready
    assert len(plain_compiler) == 1, "one for all layers"
    assert threading.active_count() == before
    layers.detach()
    prepared.restore()
    assert all("forward" not in layer.__dict__ for layer in target.layers)


def test_a_compiler_that_fails_leaves_the_layers_as_they_are(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler after all")

    monkeypatch.setattr(torch, "compile", fail)
    compiled_layers.forget_compiled()
    wanted = [hf_greedy(target, prompt, 16) for prompt in prompts(2)]
    engine = Engine(target, None, EngineSettings(max_slots=2, max_model_len=256, compile=True))
    outputs = engine.generate(prompts(2), GREEDY)
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert caplog.text.count("no compiler after all") == 1


def test_code_that_fails_while_serving_is_used_no_more_and_the_text_is_right(
    target: LanguageModel,
    plain_compiler: list[Callable[..., Any]],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wanted = [hf_greedy(target, prompt, 16) for prompt in prompts(2)]
    engine = Engine(target, None, EngineSettings(max_slots=2, max_model_len=256, compile=True))
    assert engine.runner.prepared.layers.ready

    def fail() -> None:
        raise RuntimeError("recompile limit")

    monkeypatch.setattr(slot_attention, "passed_view", fail)
    outputs = engine.generate(prompts(2), GREEDY)
    assert not engine.runner.prepared.layers.ready
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert caplog.text.count("recompile limit") == 1
