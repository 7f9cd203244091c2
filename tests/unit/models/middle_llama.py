"""A Llama just large enough for the kernels of few tokens."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distillspec.models import LanguageModel
from distillspec.models.target import wrap
from distillspec.models.tiny import tiny_tokenizer


def llama(dtype: torch.dtype = torch.float32, **changes: object) -> LanguageModel:
    """Three layers, just large enough, with weights that 16 bits hold."""
    torch.manual_seed(2)
    settings = {
        "vocab_size": 259,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "initializer_range": 0.2,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    model = LlamaForCausalLM(LlamaConfig(**{**settings, **changes})).eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.copy_(1 + 0.3 * torch.randn_like(parameter))
        parameter.copy_(parameter.bfloat16().half())
    return wrap(model.to(dtype), tiny_tokenizer(), "middle")
