"""Llama-shaped models of random weights, for `gpu.py` and `gpu_exact.py`."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distillspec.models import LanguageModel
from distillspec.models.tiny import tiny_tokenizer
from distillspec.types import ModelIdentity

# hidden, feed-forward, layers, heads, key/value heads, vocabulary: Llama 3.2 1B and 3.1 8B, and one for a trial
SHAPES = {
    "tiny": (64, 128, 4, 4, 2, 512),
    "1b": (2048, 8192, 16, 32, 8, 128256),
    "8b": (4096, 14336, 32, 32, 8, 128256),
}


def random_model(
    name: str, device: torch.device, layer_share: int = 1, dtype: torch.dtype = torch.bfloat16, *, tied: bool = True
) -> LanguageModel:
    """Make a Llama of random weights on the device. Its ids need not be the tokenizer's.

    Args:
        tied: the head is the embedding, as in the 1B model. Such a random model writes its last token again and again.
    """
    hidden, feed_forward, layers, heads, kv_heads, vocabulary = SHAPES[name]
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=max(1, layers // layer_share),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=4096,
        tie_word_embeddings=tied and name != "8b",
        dtype=dtype,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = LlamaForCausalLM(config).eval().requires_grad_(False)
    finally:
        torch.set_default_dtype(before)
    identity = ModelIdentity("random", vocabulary, f"{name}-{layer_share}")
    return LanguageModel(model, tiny_tokenizer(), identity, f"{name}-shaped random model")
