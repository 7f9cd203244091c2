"""The attention is chosen once, by trying kernels. An engine writes the same text with each."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.few_queries import few_queries_attention
from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_attention import is_hooked
from distillspec.models.slot_cache import Attend, masked_attention
from distillspec.models.varlen_attention import varlen_attention
from distillspec.serving import SamplingParams
from distillspec.serving.execution import attention as module
from distillspec.serving.execution.attention import MASKED, NATIVE, choose_attention

from ...models.slot_cases import varlen_described
from ..conftest import INTERPRETED, MakeEngine, hf_greedy, prompts

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
no_gpu = pytest.mark.skipif(bool(shutil.which("nvidia-smi")), reason="kernels are compiled here, not interpreted")


@no_gpu
@pytest.mark.numerics
@pytest.mark.parametrize("setting", ["auto", "native"])
def test_a_cpu_takes_the_kernel_that_it_builds(target: LanguageModel, setting: str) -> None:
    assert choose_attention(setting, [target]) == (few_queries_attention, NATIVE)


@no_gpu
def test_a_cpu_without_a_compiler_takes_masks(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "why_not", lambda: "no C++ compiler")
    attend, words = choose_attention("auto", [target])
    assert attend is masked_attention
    assert words == f"{MASKED} (no C++ compiler)"
    with pytest.raises(ConfigError, match=r"attention=native does not work on cpu .no C.. compiler.; use"):
        choose_attention("native", [target])


@no_gpu
@needs_triton
def test_the_kernel_where_it_is_asked_for_and_right(target: LanguageModel) -> None:
    attend, words = choose_attention("triton", [target])
    assert attend is ragged_attention
    assert "Triton" in words


@no_gpu
@needs_triton
@pytest.mark.parametrize("kind", ["gemma2", "mistral"])
def test_it_is_tried_on_what_the_model_asks_for(
    random_model: Callable[[str], LanguageModel], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int | None, float | None]] = []

    def watched(query: torch.Tensor, *rest: Any, window: int | None, softcap: float | None) -> torch.Tensor:
        asked.append((window, softcap))
        return ragged_attention(query, *rest, window=window, softcap=softcap)

    monkeypatch.setattr(module, "ragged_attention", watched)
    model = random_model(kind)
    choose_attention("triton", [model])
    config = model.model.config
    assert {window for window, _ in asked} == {None, min(config.sliding_window, 64)}
    assert {softcap for _, softcap in asked} == {getattr(config, "attn_logit_softcapping", None)}


@no_gpu
def test_a_kernel_that_fails_or_is_wrong_is_refused(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no\ncompiler")

    def wrong(query: torch.Tensor, *rest: Any, **how: Any) -> torch.Tensor:
        return masked_attention(query * 1.1, *rest, **how)

    for kernel, why in ((broken, "RuntimeError: no compiler"), (wrong, "it is off by")):
        monkeypatch.setattr(module, "ragged_attention", kernel)
        with pytest.raises(ConfigError, match=f"attention=triton does not work on cpu .{why}"):
            choose_attention("triton", [target])


@no_gpu
def test_float64_is_left_to_masks(random_model: Callable[[str], LanguageModel]) -> None:
    model = deepcopy(random_model("llama"))
    model.model.double()
    with pytest.raises(ConfigError, match="does not compute in float64"):
        choose_attention("triton", [model])


def test_auto_falls_back_and_says_why(target: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device whose compiler fails."""
    monkeypatch.setattr(module, "kernel_failure", lambda attend, models, page: "OutOfResources: shared memory")
    monkeypatch.setattr(LanguageModel, "device", property(lambda self: torch.device("cuda")))
    attend, words = choose_attention("auto", [target])
    assert attend is masked_attention
    assert "no Triton kernel: OutOfResources: shared memory;" in words
    assert "no variable-length attention: OutOfResources: shared memory" in words


@pytest.mark.parametrize(
    ("broken", "wanted", "why"),
    [
        (None, (ragged_attention, varlen_attention), ""),
        (varlen_attention, ragged_attention, "(no variable-length attention: broken)"),
        (ragged_attention, varlen_attention, "(no Triton kernel: broken)"),
    ],
)
def test_auto_takes_what_works(
    target: LanguageModel, monkeypatch: pytest.MonkeyPatch, broken: Attend | None, wanted: object, why: str
) -> None:
    """As on a CUDA device: the Triton kernel for windows of drafted tokens, torch's for prompts."""
    monkeypatch.setattr(module, "kernel_failure", lambda attend, models, page: "broken" if attend is broken else None)
    monkeypatch.setattr(LanguageModel, "device", property(lambda self: torch.device("cuda")))
    attend, words = choose_attention("auto", [target])
    taken = (attend.func, attend.keywords["otherwise"]) if isinstance(attend, partial) else attend
    assert taken == wanted
    assert words.endswith(why)


@no_gpu
def test_varlen_on_a_cpu_is_refused_in_a_line(target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"attention=varlen does not work on cpu \(NotImplementedError: .*masked$"):
        choose_attention("varlen", [target])


def test_a_refused_engine_leaves_its_model_alone(
    make_engine: MakeEngine, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "kernel_failure", lambda attend, models, page: "nothing works")
    with pytest.raises(ConfigError, match="nothing works"):
        make_engine(attention="triton")
    assert not is_hooked(target.model)


@no_gpu
@needs_triton
@pytest.mark.usefixtures("no_kernel_trial")
def test_an_engine_writes_the_same_text(
    make_engine: MakeEngine, shallow_target: LanguageModel, shallow_draft: LanguageModel
) -> None:
    asked = [prompt[:18] for prompt in prompts(3)]
    wanted = [hf_greedy(shallow_target, prompt, 4) for prompt in asked]
    engine = make_engine(
        shallow_draft, model=shallow_target, max_slots=2, max_model_len=96, speculation_length=2, **INTERPRETED
    )
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=4))
    assert [list(output.token_ids) for output in outputs] == wanted


@no_gpu
@pytest.mark.numerics
def test_an_engine_writes_the_same_text_with_varlen(
    make_engine: MakeEngine, target: LanguageModel, draft: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chosen by its trial, then prompts in chunks and windows of several rows: torch's part answered from its
    description."""
    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_described)
    asked = prompts(4)
    wanted = [hf_greedy(target, prompt, 6) for prompt in asked]
    engine = make_engine(
        draft, attention="varlen", max_slots=3, max_model_len=160, prefill_chunk=16, speculation_length=2
    )
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=6))
    assert [list(output.token_ids) for output in outputs] == wanted
