"""A compiled decoder gives what the plain one gives, for any number of tokens, and never stops an engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft, packed_linear, product_trial, slot_attention
from distillspec.models.packed_products import HalfProduct, OneDnnProduct
from distillspec.models.packing import FEW_TOKENS, Packing
from distillspec.native.library import cpp_compiler
from distillspec.serving import Engine, EngineSettings, Request, SamplingParams
from distillspec.serving.execution.compiled_decoder import CACHE_VARIABLE, CompiledDecoder
from distillspec.serving.execution.prepared import PreparedModel, may_compile

from ...models.state_drafts import state_draft
from ..conftest import hf_greedy, prompts
from .test_graphs import FakeRecorder

GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
needs_compiler = pytest.mark.skipif(cpp_compiler() is None, reason="needs a C++ compiler")


@pytest.fixture
def plain_compiler(monkeypatch: pytest.MonkeyPatch) -> list[Callable[..., Any]]:
    """Replace the compiler by one that returns what it is given. Returns the functions that it was given."""
    made: list[Callable[..., Any]] = []

    def compiled(forward: Callable[..., Any], **_: Any) -> Callable[..., Any]:
        made.append(forward)

        def run(decoder: Any, *args: Any, **kwargs: Any) -> Any:
            return forward(decoder, *args, slot_view=slot_attention.passed_view(), **kwargs)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    return made


def features_while_running(engine: Engine) -> torch.Tensor:
    """Features of a prompt and some of its answer. Closes the engine."""
    engine.submit(Request("a", tuple(prompts()[4]), GREEDY))
    for _ in range(3):
        engine.step()
    found = engine.features("a/0").clone()
    engine.close()
    return found


@pytest.mark.long
@needs_compiler
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # the compiler's own affair
@pytest.mark.filterwarnings("ignore:.*:FutureWarning")
def test_one_code_serves_any_number_of_tokens_and_is_kept_on_disk(
    target: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")  # so that it is taken back afterwards, whatever it was
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    few, many = (HalfProduct,), (OneDnnProduct,)
    monkeypatch.setattr(product_trial, "ranked", lambda dtype, weights, tokens: few if tokens == FEW_TOKENS else many)
    monkeypatch.setattr(packed_linear, "SMALLEST", 1)
    # A model that drafts for itself: each layer, and each further model, takes its time to compile.
    target = draft = initialise_draft(DraftConfig(layers=2), target)
    for parameter in target.model.parameters():
        parameter.data.copy_(parameter.data.half())  # so that it may be packed
    wanted = [hf_greedy(target, prompt, 16) for prompt in prompts(3)]
    kept = {
        "max_slots": 2,
        "max_model_len": 256,
        "controller": "fixed",
        "speculation_length": 3,
        "feature_ids": [0, 1, 2],
    }
    settings = EngineSettings(**kept, compile=True)
    with_features = features_while_running(Engine(target, draft, EngineSettings(**kept, compile=False)))
    torch._dynamo.utils.counters.clear()
    engine = Engine(target, draft, settings)
    decoder = engine.runner.prepared.compiled
    assert decoder is not None
    assert decoder.ready
    assert engine.runner.prepared.packs.packing == Packing(HalfProduct, OneDnnProduct)
    made = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    outputs = engine.generate(prompts(3), GREEDY)
    assert decoder.ready, "no compiled call failed"
    torch.testing.assert_close(features_while_running(engine), with_features)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert made <= 2, "one token and more"
    assert sum(output.stats.accepted for output in outputs) > 0, "drafts were read with it too"
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == made, "nothing is compiled while serving"
    assert Path(os.environ[CACHE_VARIABLE]) == tmp_path / "distillspec" / "compiled"
    assert ".so" in {path.suffix for path in tmp_path.rglob("*") if path.is_file()}, "the compiled code itself"
    assert "forward" not in target.decoder.__dict__


def test_code_checks_its_arguments_and_not_the_decoders_thousand_attributes(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards as torch names them, of a decoder's forward that is wrapped in another function."""
    options: dict[str, Any] = {}

    def compiled(forward: Callable[..., Any], **named: Any) -> None:
        options.update(named["options"])
        assert forward.__code__ is not type(target.decoder).forward.__code__, "found by its code, and one decoder's"
        raise RuntimeError("enough")

    monkeypatch.setattr(torch, "compile", compiled)
    engine = Engine(target, None, EngineSettings(max_slots=2, max_model_len=256, compile=True))
    engine.close()
    names = {
        "": True,
        "kwargs['position_ids']": True,
        "L['kwargs']['position_ids']": True,
        "args[1]": True,
        "args[0]": False,
        "L['args'][0]": False,
        "args[0].layers[3].mlp": False,
        "func.__closure__[0].cell_contents": False,
        "G['torch']": False,
    }
    found = options["guard_filter_fn"]([SimpleNamespace(name=name) for name in names])
    assert dict(zip(names, found, strict=True)) == names


def test_a_decoder_is_compiled_in_the_background_once_it_pays(
    target: LanguageModel, plain_compiler: list[Callable[..., Any]]
) -> None:
    prepared = PreparedModel(target, pack_weights=False, compile=False)
    decoder = CompiledDecoder(target, after_s=10.0)
    decoder.spent(9.0)
    assert not decoder.ready
    assert not plain_compiler
    before = threading.active_count()
    decoder.spent(1.5)
    decoder.join()
    assert decoder.ready
    assert len(plain_compiler) == 1
    assert threading.active_count() == before
    decoder.detach()
    prepared.restore()
    assert "forward" not in target.decoder.__dict__


def test_code_serves_passes_of_the_threads_that_it_is_made_for(
    target: LanguageModel, plain_compiler: list[Callable[..., Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [hf_greedy(target, prompt, 16) for prompt in prompts(2)]
    engine = Engine(target, None, EngineSettings(max_slots=2, max_model_len=256, compile=True))
    decoder = engine.runner.prepared.compiled
    threads = torch.get_num_threads()

    def fail() -> None:
        raise RuntimeError("called with other threads than its own")

    try:
        torch.set_num_threads(threads + 1)
        assert not decoder.ready
        with monkeypatch.context() as patched:
            patched.setattr(slot_attention, "passed_view", fail)
            outputs = engine.generate(prompts(2), GREEDY)
        assert [list(output.token_ids) for output in outputs] == wanted
        assert len(plain_compiler) == 1, "nothing is compiled in a pass"
        decoder.spent(1e6)
        decoder.join()
        assert decoder.ready
        assert len(plain_compiler) == 2
        torch.set_num_threads(threads)
        assert decoder.ready, "the first code is kept"
        decoder.spent(1e6)
        decoder.join()
        assert len(plain_compiler) == 2
    finally:
        torch.set_num_threads(threads)
        engine.close()


@pytest.mark.parametrize("kind", ["eagle", "block"])
def test_a_single_layer_is_not_compiled(kind: str, target: LanguageModel) -> None:
    draft = state_draft(kind, target)
    prepared = PreparedModel(draft, pack_weights=False, compile=True, exact=False)
    assert prepared.compiled is None
    assert "forward" not in draft.decoder.__dict__
    prepared.restore()


@pytest.mark.parametrize(
    ("device", "layers", "choice", "compiled"),
    [
        ("cuda", 2, True, True),
        ("cuda", 2, "auto", False),  # nobody has measured it there yet
        ("cuda", 2, False, False),
        ("cuda", 1, True, False),
        ("cpu", 2, "auto", cpp_compiler() is not None),
        ("cpu", 2, False, False),
    ],
)
def test_which_models_are_compiled(device: str, layers: int, choice: bool | str, compiled: bool) -> None:
    model: Any = SimpleNamespace(device=torch.device(device), attends=True, layers=[None] * layers)
    assert may_compile(model, choice) == compiled


def test_recorded_passes_are_compiled_before_they_are_recorded(
    target: LanguageModel, plain_compiler: list[Callable[..., Any]]
) -> None:
    """As on CUDA: layers compiled, then graphs of them."""
    compiled_before: list[int] = []

    class Noting(FakeRecorder):
        def record(self, run: Callable[[], Any]) -> Callable[[], Any]:
            compiled_before.append(len(plain_compiler))
            return super().record(run)

    wanted = [hf_greedy(target, prompt, 16) for prompt in prompts(3)]
    settings = EngineSettings(max_slots=2, max_model_len=256, controller="fixed", compile=True)
    recorder = Noting()
    engine = Engine(target, None, settings, recorder=recorder)
    outputs = engine.generate(prompts(3), GREEDY)
    assert set(compiled_before) == {1}
    assert recorder.replayed > 0
    assert engine.runner.prepared.compiled.ready, "no compiled call failed"
    assert [list(output.token_ids) for output in outputs] == wanted
    engine.close()


@pytest.mark.parametrize("kind", ["two layers of eagle", "features"])
def test_deeper_drafts_that_read_states_are_compiled_too(
    kind: str, target: LanguageModel, plain_compiler: list[Callable[..., Any]]
) -> None:
    draft, wanted = state_draft(kind, target), [hf_greedy(target, prompt, 16) for prompt in prompts(3)]
    settings = EngineSettings(max_slots=2, max_model_len=256, controller="fixed", speculation_length=3, compile=True)
    engine = Engine(target, draft, settings)
    assert len(plain_compiler) == 2, "target and draft, each by itself"
    assert "forward" in draft.decoder.__dict__, "passes of the draft call compiled code"
    outputs = engine.generate(prompts(3), GREEDY)
    assert [list(output.token_ids) for output in outputs] == wanted
    assert sum(output.stats.proposed for output in outputs) > 0
    engine.close()
    assert "forward" not in draft.decoder.__dict__


def test_a_compiler_that_fails_leaves_the_decoder_as_it_is(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler after all")

    monkeypatch.setattr(torch, "compile", fail)
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
    assert engine.runner.prepared.compiled.ready

    def fail() -> None:
        raise RuntimeError("recompile limit")

    monkeypatch.setattr(slot_attention, "passed_view", fail)
    outputs = engine.generate(prompts(2), GREEDY)
    assert not engine.runner.prepared.compiled.ready
    engine.close()
    assert [list(output.token_ids) for output in outputs] == wanted
    assert caplog.text.count("recompile limit") == 1
