"""EAGLE-3 drafts: a small Llama whose first layer reads embedding and state side by side (Li et al. 2025)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import Cache, LlamaConfig, LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, apply_rotary_pos_emb

from distillspec.models.language_model import LanguageModel, attention_heads
from distillspec.models.slot_attention import CacheView, is_hooked, keep
from distillspec.models.state_input import JOINED, StateInput, defer_norm, deferred_scale

PROJECTIONS = ("q_proj", "k_proj", "v_proj")
MOST_SCALED = 15  # powers of two by which a channel is scaled


class EagleDecoder(LlamaModel):
    """Decoder that calls its layers alone over slots. What transformers does around them takes a third of a layer."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """See `LlamaModel`."""
        if not is_hooked(self):
            return super().forward(*args, **kwargs)
        return self._over_slots(*args, **kwargs)

    def _over_slots(self, inputs_embeds: Tensor, position_ids: Tensor, use_cache: bool = False, **named: Any) -> Any:
        turned = self.rotary_emb(inputs_embeds, position_ids)
        hidden = inputs_embeds
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=turned, position_ids=position_ids, **named)
        return BaseModelOutputWithPast(last_hidden_state=hidden)


class EagleLayer(LlamaDecoderLayer):
    """Decoder layer that reads embedding and state side by side. Its attention norms each, and adds to the state."""

    def __init__(self, config: LlamaConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        for name in PROJECTIONS:
            old = getattr(self.self_attn, name)
            new = nn.Linear(2 * old.in_features, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, new)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(self, hidden_states: Tensor, keys_alone: bool = False, **kwargs: Any) -> Tensor:
        """Return the layer's output `[B, L, D]` of `hidden_states [B, L, 2 · D]`.

        Args:
            keys_alone: only add keys and values to the cache. What is returned is then no output.
        """
        embeddings, states = hidden_states.chunk(2, -1)
        both = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(states)], -1)
        if keys_alone:
            self._keep_keys(both, **kwargs)
            return states
        hidden = states + self.self_attn(hidden_states=both, **kwargs)[0]
        changed: Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return changed

    def _keep_keys(
        self,
        both: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        slot_view: CacheView | None = None,
        past_key_values: Cache | None = None,
        **_: Any,
    ) -> None:
        attention = self.self_attn  # packed weights give queries too: the three are one product
        shape = (*both.shape[:-1], -1, attention.head_dim)
        projections = attention.k_proj, attention.v_proj
        keys, values = (projection(both).view(shape).transpose(1, 2) for projection in projections)
        keys = apply_rotary_pos_emb(keys, keys, *position_embeddings)[0]
        if slot_view is not None:
            keep(slot_view, attention.layer_idx, keys, values)
        else:
            assert past_key_values is not None, "keys alone need a cache"
            past_key_values.update(keys, values, attention.layer_idx)


def keeps_keys_alone(draft: LanguageModel) -> bool:
    """Return True for a draft of one EAGLE layer. Of text whose states nobody reads it needs keys and values alone."""
    return draft.attends and len(draft.layers) == 1 and isinstance(draft.layers[0], EagleLayer)


def eagle_model(
    config: LlamaConfig, state_ids: list[int], target_width: int, *, norms: bool = False
) -> PreTrainedModel:
    """Return an EAGLE-3 model in float32, random but for the states' fusion."""
    model = LlamaForCausalLM(config)
    model.model.__class__ = EagleDecoder
    model.model.layers[0] = EagleLayer(config, 0)
    defer_norm(model.model)
    model.state_input = StateInput(JOINED, state_ids, target_width, config.hidden_size, norms=norms)
    return model.eval()


def eagle_config(target: LanguageModel, layers: int) -> LlamaConfig:
    """Return the configuration of `layers` Llama layers as wide as the target's."""
    config, heads = target.model.config.get_text_config(), attention_heads(target)
    rope = getattr(config, "rope_parameters", None)
    if rope and "rope_theta" not in rope:  # one for each kind of layer (gemma3): full attention's
        rope = rope.get("full_attention")
    return LlamaConfig(
        vocab_size=target.identity.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", None) or 4 * config.hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads.query,
        num_key_value_heads=heads.kv,
        head_dim=heads.dim,
        max_position_embeddings=getattr(config, "max_position_embeddings", 2048),
        rms_norm_eps=getattr(config, "rms_norm_eps", None) or 1e-6,
        rope_parameters=rope,
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
        tie_word_embeddings=False,
    )


@torch.no_grad()
def begin_from(model: PreTrainedModel, target: LanguageModel) -> int:
    """Copy the target's last layers, final norm and head where shapes and names allow.

    The first layer reads its state as the target's layer did, and nothing of the embedding yet. Returns the number of
    tensors copied.
    """
    layers, copied = list(model.get_decoder().layers), 0
    if lends_layers(target):
        for layer, target_layer in zip(reversed(layers), reversed(target.layers), strict=False):
            copied += _copy_layer(layer, dict(target_layer.named_parameters()), first=layer is layers[0])
    return copied + copy_ends(model, target)


def lends_layers(target: LanguageModel) -> bool:
    """Return True for a target whose layers `begin_from` copies: their norms multiply by their weights."""
    final = getattr(target.decoder, "norm", None)
    return final is not None and _is_plain_norm(final)


@torch.no_grad()
def begin_evenly(draft: LanguageModel, scale: Tensor) -> None:
    """Let a draft of random layers begin with scaled states, and with a nearly even distribution.

    States of hundreds, as gemma's are, would drown what random layers add to them, and behind the target's final norm
    they are sure of wrong tokens.

    Args:
        scale: of each channel, `[len(state_ids) · D]` (`channel_scale`).
    """
    assert draft.state_input is not None
    weight = draft.head.weight
    draft.state_input.scale = scale.to(weight.device)
    spread = weight.float().square().mean().sqrt() * weight.shape[1] ** 0.5  # of logits, of a state of ones
    deferred_scale(draft.decoder).fill_(1 / float(spread))


def channel_scale(states: Tensor) -> Tensor:
    """Return the powers of two `[F]` float32 that bring the root mean square of each channel of `[n, F]` next to 1.

    A product with them is exact in float32 and bfloat16. They are bounded: what is 0 here may not be so elsewhere.
    """
    size = states.float().square().mean(0).clamp(min=torch.finfo(torch.float32).tiny)
    return torch.exp2(-(size.log2() / 2).round().clamp(-MOST_SCALED, MOST_SCALED))


@torch.no_grad()
def begin_at_size(draft: LanguageModel, states: Tensor) -> None:
    """Let norms of states begin with the size that these states `[n, len(state_ids) · D]` have in the mean.

    A layer that was copied from the target adds to a state what fits its size.
    """
    assert draft.state_input is not None
    assert draft.state_input.norms is not None
    norms = draft.state_input.norms
    size = states.float().unflatten(-1, (-1, norms.width)).square().mean(-1).sqrt().mean(0)
    norms.weight.copy_(size.repeat_interleave(norms.width))


@torch.no_grad()
def copy_ends(model: PreTrainedModel, target: LanguageModel) -> int:
    """Copy the target's final norm and head where shapes allow. Returns the number of tensors copied."""
    copied, head = 0, model.get_output_embeddings().weight
    if (scale := final_scale(target)) is not None:
        deferred_scale(model.get_decoder()).copy_(scale)
        copied += 1
    width = target.head.weight.shape[1]
    if head[:, :width].shape == target.head.weight.shape:  # what a Markov head reads comes behind
        head[:, :width] = target.head.weight * target.head.scale
        copied += 1
    return copied


def _copy_layer(layer: nn.Module, source: dict[str, Tensor], first: bool) -> int:
    copied = 0
    for name, value in layer.named_parameters():
        known = source.get("input_layernorm.weight" if name == "hidden_norm.weight" else name)
        if known is None or (name == "input_layernorm.weight" and first):
            continue
        if known.shape == value.shape:
            value.copy_(known)
        elif first and known.ndim == 2 and value.shape == (known.shape[0], 2 * known.shape[1]):
            value.zero_()
            value[:, known.shape[1] :] = known
        else:
            continue
        copied += 1
    return copied


def final_scale(target: LanguageModel) -> Tensor | None:
    """Return what the target's final norm multiplies by `[D]`, None for one that is no RMS norm.

    It is measured, for some families keep the weights less one (gemma).
    """
    final = getattr(target.decoder, "norm", None)
    if final is None:
        return None
    varied = torch.linspace(-2, 3, len(final.weight)).to(final.weight)[None]
    scale: Tensor = final(torch.full_like(varied, 2.0**10))[0]  # so large that no epsilon matters
    expected = scale * varied * varied.square().mean().rsqrt()
    return scale if torch.allclose(final(varied)[0], expected[0], rtol=2e-2, atol=2e-2) else None


def _is_plain_norm(norm: nn.Module) -> bool:
    """Return True for an RMS norm that multiplies by its weight, not by 1 + weight (gemma)."""
    weight = norm.weight
    assert isinstance(weight, Tensor)
    return bool(torch.allclose(norm(torch.ones_like(weight)[None]), weight[None], rtol=1e-2, atol=1e-2))
