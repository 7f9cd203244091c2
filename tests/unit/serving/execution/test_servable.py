"""Models that the engine would serve wrongly are refused when it is made, each with its reason."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.models import slot_cache as slots
from distillspec.models.slot_attention import is_hooked
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_tokenizer
from distillspec.serving.execution import attention_check
from distillspec.serving.execution.servable import check_servable

SMALL: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def made(kind: str, **changes: Any) -> LanguageModel:
    config = AutoConfig.for_model(kind, **{**SMALL, **changes})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)
    return wrap(model, tiny_tokenizer(), kind)


def test_attention_with_sinks() -> None:
    model = made("gpt_oss", head_dim=16, num_local_experts=2, num_experts_per_tok=1)
    with pytest.raises(ConfigError, match=r"gpt_oss cannot use the engine's slots \(NotImplementedError: .* sinks"):
        check_servable(model, 128)
    assert not is_hooked(model.model)


def test_keys_and_values_of_unlike_size() -> None:
    model = made(
        "deepseek_v3",
        num_key_value_heads=4,
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=12,
    )
    with pytest.raises(ConfigError, match=r"deepseek_v3 cannot use .* shape"):
        check_servable(model, 128)


def test_attention_that_looks_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like an architecture with masks that the engine does not know. A model is tried only once."""
    model, other = made("llama", initializer_range=0.3), made("llama", initializer_range=0.3)
    check_servable(other, 128)
    short_sighted = partial(slots.SlotCache, attend=lambda *rest: slots.masked_attention(*rest[:5], 1))
    monkeypatch.setattr(attention_check, "SlotCache", short_sighted)
    check_servable(other, 128)
    with pytest.raises(ConfigError, match="llama has other hidden states through the engine's slots, off by"):
        check_servable(model, 128)


@pytest.mark.parametrize("kind", ["longrope", "dynamic"])
def test_rotary_embeddings_that_grow_with_the_longest_row(kind: str) -> None:
    factors: dict[str, Any] = {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8} if kind == "longrope" else {}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128, **factors}
    model = made("llama", rope_parameters=rope)
    with pytest.raises(ConfigError, match=f"type {kind}.*set max_model_len=128 or less, not 129"):
        check_servable(model, 129)
    check_servable(model, 128)


def test_chunked_attention() -> None:
    model = made("llama")
    model.model.config.attention_chunk_size = 64
    with pytest.raises(ConfigError, match="set max_model_len=64 or less, not 65"):
        check_servable(model, 65)
    check_servable(model, 64)
