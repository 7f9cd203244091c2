"""The attention is chosen once, by trying it; an engine writes the same text with either."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from distillspec.config import DraftConfig, TargetConfig
from distillspec.errors import ConfigError
from distillspec.models import initialise_draft, load_target
from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_cache import masked_attention
from distillspec.serving import SamplingParams
from distillspec.serving import attention as module
from distillspec.serving.attention import choose_attention

from .conftest import MakeEngine, hf_greedy, prompts

CPU = torch.device("cpu")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None or (DEVICE.type == "cpu" and "TRITON_INTERPRET" not in os.environ),
    reason="needs Triton, and a CUDA device or its interpreter (see tests/conftest.py)",
)


def test_a_cpu_takes_masks() -> None:
    attend, words = choose_attention("auto", CPU, torch.float32)
    assert attend is masked_attention
    assert "masked" in words


@needs_triton
def test_the_kernel_where_it_is_asked_for_and_right() -> None:
    attend, words = choose_attention("triton", DEVICE, torch.float32)
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
def test_an_engine_writes_the_same_text(make_engine: MakeEngine) -> None:
    target = load_target(TargetConfig(path="tiny", dtype="float32", device=DEVICE.type))
    written = []
    for attention in ("triton", "masked"):
        draft = initialise_draft(DraftConfig(layers=2), target)
        engine = make_engine(
            draft, model=target, attention=attention, max_slots=2, max_model_len=96, speculation_length=2
        )
        outputs = engine.generate(prompts(3), SamplingParams(temperature=0.0, max_tokens=6))
        written.append([output.token_ids for output in outputs])
        engine.close()
    assert written[0] == written[1]
    if DEVICE == CPU:
        assert [list(own) for own in written[0]] == [hf_greedy(target, prompt, 6) for prompt in prompts(3)]
