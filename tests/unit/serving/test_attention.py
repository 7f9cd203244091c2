"""The attention is chosen once, by trying it; an engine writes the same text with either."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_cache import masked_attention
from distillspec.serving import SamplingParams
from distillspec.serving import attention as module
from distillspec.serving.attention import choose_attention

from .conftest import MakeEngine, hf_greedy, prompts

CPU = torch.device("cpu")
needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")


def test_a_cpu_takes_masks() -> None:
    attend, words = choose_attention("auto", CPU, torch.float32)
    assert attend is masked_attention
    assert "masked" in words


@needs_triton
def test_the_kernel_where_it_is_asked_for_and_right() -> None:
    attend, words = choose_attention("triton", CPU, torch.float32)
    assert attend is ragged_attention
    assert "Triton" in words


def test_a_kernel_that_fails_or_is_wrong_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> torch.Tensor:
        raise RuntimeError("no\ncompiler")

    def wrong(query: torch.Tensor, *rest: object, **how: object) -> torch.Tensor:
        return masked_attention(query * 1.1, *rest, **how)  # type: ignore[arg-type]

    for kernel, why in ((broken, "RuntimeError: no compiler"), (wrong, "it is off by")):
        monkeypatch.setattr(module, "ragged_attention", kernel)
        with pytest.raises(ConfigError, match=f"attention=triton does not work on cpu .{why}"):
            choose_attention("triton", CPU, torch.float32)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_auto_falls_back_and_says_why() -> None:
    attend, words = choose_attention("auto", torch.device("cuda"), torch.float32)
    assert attend is masked_attention
    assert "no Triton kernel: " in words


@needs_triton
def test_an_engine_writes_the_same_text(make_engine: MakeEngine, target: LanguageModel, draft: LanguageModel) -> None:
    asked = prompts(3)
    wanted = [hf_greedy(target, prompt, 6) for prompt in asked]
    engine = make_engine(draft, attention="triton", max_slots=2, max_model_len=96, speculation_length=2)
    outputs = engine.generate(asked, SamplingParams(temperature=0.0, max_tokens=6))
    assert [list(output.token_ids) for output in outputs] == wanted
