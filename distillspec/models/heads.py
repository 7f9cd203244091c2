"""Drafts of heads on one state of the target: Medusa's (Cai et al. 2024), and Hydra's, which read the drafted tokens
too (Ankner et al. 2024).

Drafted position k has a head of its own, so such a draft can propose as many tokens as it has heads. There is no
attention and no cache: all that it knows of the text is the target's state of the token before the newest.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from distillspec.models.state_input import PARALLEL, SEQUENTIAL, StateInput, defer_norm


class Head(nn.Module):
    """Head of one drafted position, on `[embedding; state]`.

    `down_proj` starts at zero, so an untrained head returns the state.
    """

    def __init__(self, config: LlamaConfig, position: int, sequential: bool) -> None:
        super().__init__()
        width = config.hidden_size
        self.position = position
        self.sequential = sequential
        if sequential:
            self.embedding_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
            self.state_norm = LlamaRMSNorm(width, eps=config.rms_norm_eps)
            self.up_proj = nn.Linear(2 * width, 2 * width, bias=False)
        self.down_proj = nn.Linear(2 * width if sequential else width, width, bias=False)
        nn.init.zeros_(self.down_proj.weight)

    def forward(self, hidden_states: Tensor, drafted: int = 0, **_: Any) -> Tensor:
        """Return the state `[B, L, D]` to carry on, of `hidden_states [B, L, 2 · D]`.

        Hydra's depends on the newest token. Medusa's is the target's at all positions. Heads of other positions than
        `drafted` pass on what they get.
        """
        if drafted != self.position:
            return hidden_states
        embeddings, states = hidden_states.chunk(2, -1)
        if not self.sequential:
            return states
        both = torch.cat([self.embedding_norm(embeddings), self.state_norm(states)], -1)
        changed: Tensor = states + self.down_proj(silu(self.up_proj(both)))
        return changed

    def read(self, carried: Tensor) -> Tensor:
        """Return what the head reads, of normed states `[…, D]`. Medusa's residual block comes last."""
        return carried if self.sequential else carried + silu(self.down_proj(carried))


class TargetNorm(nn.Module):
    """The target's final norm (RMS), which does not train: Medusa's heads read the state that the target's head reads.

    Other engines hand over that state, so a norm of the draft's own could not be exported.
    """

    weight: Tensor

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.register_buffer("weight", torch.ones(width))
        self.eps = eps

    def forward(self, hidden: Tensor) -> Tensor:
        """Return normed states `[…, D]` in their dtype, computed in float32."""
        wide = hidden.float()  # as the target's norm does, in float64 too
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (self.weight * normed.to(hidden.dtype)).to(hidden.dtype)


def heads_model(config: LlamaConfig, way: str, state_ids: list[int], target_width: int) -> PreTrainedModel:
    """Return a model of `config.num_hidden_layers` heads, which make a Llama without attention."""
    model = LlamaForCausalLM(config)
    heads = [Head(config, position, way == SEQUENTIAL) for position in range(config.num_hidden_layers)]
    model.model.layers = nn.ModuleList(heads)
    if way == PARALLEL:
        model.model.norm = TargetNorm(config.hidden_size, config.rms_norm_eps)
    defer_norm(model.model)
    model.state_input = StateInput(way, state_ids, target_width, config.hidden_size)
    return model.eval()
