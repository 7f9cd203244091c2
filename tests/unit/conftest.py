"""The tiny target and small random models of several architectures, shared by the unit tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_tokenizer

SMALL: dict[str, Any] = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
WINDOW = 7  # shorter than the prompts, so that a forgotten sliding window shows

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": {**SMALL, "head_dim": 8, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 2},
    "mistral": {**SMALL, "sliding_window": WINDOW},
    "gemma2": {**SMALL, "head_dim": 8, "sliding_window": WINDOW, "attn_logit_softcapping": 2.0},
    "gemma3_text": {**SMALL, "head_dim": 8, "sliding_window": WINDOW, "sliding_window_pattern": 2},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "smollm3": {**SMALL, "no_rope_layer_interval": 2, "pad_token_id": 2},
    "gpt2": {
        "vocab_size": 264,
        "n_embd": 32,
        "n_layer": 4,
        "n_head": 4,
        "n_positions": 256,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    },
}

MakeRandom = Callable[..., LanguageModel]


@pytest.fixture(scope="session")
def target() -> LanguageModel:
    """`target=tiny`: four layers, head five rows wider than its tokenizer."""
    return load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))


@pytest.fixture(scope="session")
def random_model() -> MakeRandom:
    """`random_model("gemma3_text", torch.float64)`: random layers of an architecture behind the tiny tokenizer, four
    where nothing else is asked for."""

    @cache
    @torch.inference_mode(False)  # a test in inference mode shares the model with others that train it
    def make(kind: str, dtype: torch.dtype = torch.float32, layers: int | None = None) -> LanguageModel:
        torch.manual_seed(1)
        own = {} if layers is None else {"num_hidden_layers": layers}
        config = AutoConfig.for_model(kind, **{**ARCHITECTURES[kind], **own})
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).to(dtype).eval()
        model.requires_grad_(False)
        return wrap(model, tiny_tokenizer(), kind)

    return make
