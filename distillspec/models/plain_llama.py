"""Models whose layers our own kernels know: Llama's."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaModel, LlamaRMSNorm

from distillspec.models.eagle import PROJECTIONS, EagleDecoder, EagleLayer
from distillspec.models.language_model import LanguageModel
from distillspec.models.state_input import DeferredNorm

ATTENTION = (*PROJECTIONS, "o_proj")
GATED = ("gate_proj", "up_proj")
ROTARY = ("default", "linear", "llama3")  # kinds whose angles depend on the position alone


def has_llama_layers(model: LanguageModel) -> bool:
    """Return True for layers of Llama, or EAGLE's of the same parts, without biases, windows and changing angles."""
    config, decoder = model.model.config.get_text_config(), model.decoder
    if type(decoder) not in (LlamaModel, EagleDecoder):
        return False
    if not all(type(layer) in (LlamaDecoderLayer, EagleLayer) for layer in model.layers):
        return False
    rope = getattr(config, "rope_parameters", None) or {}
    plain = config.hidden_act == "silu" and rope.get("rope_type", "default") in ROTARY
    final = decoder.norm
    norms = isinstance(final, LlamaRMSNorm) or (isinstance(final, DeferredNorm) and model.state_input is not None)
    biased = any(isinstance(part, nn.Linear) and part.bias is not None for part in decoder.modules())
    return plain and norms and not biased and getattr(config, "sliding_window", None) is None


def products_of(layer: Any) -> list[nn.Linear]:
    """Return the products of a layer."""
    attention, mlp = layer.self_attn, layer.mlp
    return [*(getattr(attention, name) for name in ATTENTION), *(getattr(mlp, name) for name in GATED), mlp.down_proj]
