"""Input of drafts that read the target's hidden states, as in EAGLE-3 (Li et al. 2025).

Such a draft reads token i beside the target's state of token i − 1, the newest one that the target has computed when
token i is known. Behind the last token that the target has read, its own last state takes the place of the target's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from distillspec.errors import ConfigError

JOINED, ADDED = "joined", "added"  # ways to bring the states in
PARALLEL, SEQUENTIAL = "heads", "sequential heads"  # the same as joined, for heads without attention
BLOCK = "block"  # the same as joined, with masks in place of tokens not drafted yet
EPS = 1e-6


class StateNorms(nn.Module):
    """Norms (RMS) of the states that a draft reads, each by itself. States of one size weigh alike when they are fused.

    Attributes:
        weight: `[states · width]`.
    """

    def __init__(self, states: int, width: int) -> None:
        super().__init__()
        self.width = width
        self.weight = nn.Parameter(torch.ones(states * width))

    def forward(self, states: Tensor) -> Tensor:
        """Return normed states `[…, states · width]`."""
        apart = states.unflatten(-1, (-1, self.width))
        return rms_norm(apart, apart.shape[-1:], eps=EPS).flatten(-2) * self.weight


class StateInput(nn.Module):
    """Turns embeddings and states into the input of a draft's first layer. It belongs to the draft's model.

    `joined` puts both side by side for a first layer that reads twice the width. `added` adds a projection of the
    states to the embeddings, zero at the start, so that training begins with what the draft already knows. Heads read
    both side by side too.

    Attributes:
        state_ids: states of the target, numbered as in `FeatureTap`.
        scale: `[len(state_ids) · D]` what the target's states are multiplied by first, None for nothing.
        norms: of the states before they are fused, None to read them at the size that they have.
        precision: of the states that it learnt from, `bf16`, `fp8` or `float32`. None before training.
    """

    scale: Tensor | None
    precision: str | None = None

    def __init__(
        self, way: str, state_ids: Sequence[int], target_width: int, width: int, *, norms: bool = False
    ) -> None:
        super().__init__()
        self.way, self.state_ids = way, tuple(state_ids)
        self.target_width = target_width
        self.register_buffer("scale", None)
        self.fc: nn.Module = nn.Identity()
        self.norms = StateNorms(len(self.state_ids), target_width) if norms else None
        if way == PARALLEL and len(self.state_ids) == 1 and target_width == width:
            self.projection = None
            return  # Medusa's heads read the target's state itself
        self.fc = nn.Linear(len(self.state_ids) * target_width, width, bias=False)
        self.projection = nn.Linear(width, width, bias=False) if way == ADDED else None
        with torch.no_grad():
            if target_width == width:  # begin with the highest state, which the target's own last layers read
                self.fc.weight.zero_()
                self.fc.weight[:, -width:] = torch.eye(width)
            else:
                self.fc.weight.normal_(0, 1 / math.sqrt(self.fc.in_features))
            if self.projection is not None:
                self.projection.weight.zero_()

    @property
    def attends(self) -> bool:
        """True if the draft has attention, and so keys and values of its own."""
        return self.way in (JOINED, ADDED, BLOCK)

    @property
    def fuses(self) -> bool:
        """False for heads that read the target's state itself."""
        return isinstance(self.fc, nn.Linear)

    def fuse(self, states: Tensor) -> Tensor:
        """Return one state `[…, width]` of the target's `[…, len(state_ids) · D]`."""
        if not isinstance(self.fc, nn.Linear):
            return states
        read = states.to(self.fc.weight.dtype)
        scaled = read if self.scale is None else read * self.scale.to(read)
        fused: Tensor = self.fc(scaled if self.norms is None else self.norms(scaled))
        return fused

    def fusion(self) -> Tensor:
        """Return the matrix `[width, len(state_ids) · D]` that fuses the states as the target hands them out."""
        assert isinstance(self.fc, nn.Linear), "heads on the state itself fuse nothing"
        assert self.norms is None, "no matrix norms states"
        weight = self.fc.weight.detach()
        return weight if self.scale is None else weight * self.scale.to(weight)

    def forward(self, embeddings: Tensor, fed: Tensor, input_ids: Tensor | None = None) -> Tensor:
        """Return the first layer's input.

        Args:
            embeddings: `[…, width]` of the tokens.
            fed: `[…, width]` states of the tokens before them, zero where there is none.
            input_ids: `[…]` the tokens, for kinds with masks.
        """
        if self.projection is None:
            return torch.cat([embeddings, fed.to(embeddings.dtype)], -1)
        added: Tensor = self.projection(rms_norm(fed, fed.shape[-1:], eps=EPS).to(embeddings.dtype))
        return embeddings + added


class DeferredNorm(nn.Module):
    """The final norm of a draft whose unnormed states are read again: the decoder passes them through."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, hidden: Tensor, *_: Any, **__: Any) -> Tensor:
        """Return the states unchanged. `norm` is applied before the head."""
        return hidden


def defer_norm(decoder: nn.Module) -> None:
    """Let a decoder return its states before the final norm.

    Raises:
        ConfigError: its final norm has an unknown name.
    """
    for name in ("norm", "ln_f", "final_layernorm", "final_layer_norm", "norm_f"):
        norm = getattr(decoder, name, None)
        if isinstance(norm, DeferredNorm):
            return
        if isinstance(norm, nn.Module):
            setattr(decoder, name, DeferredNorm(norm))
            return
    raise ConfigError(f"{type(decoder).__name__} has no final norm under a known name; use a draft without features")


def deferred_norm(decoder: nn.Module) -> nn.Module:
    """Return the final norm that `defer_norm` set aside."""
    norm: nn.Module = next(child.norm for child in decoder.children() if isinstance(child, DeferredNorm))
    return norm


def deferred_scale(decoder: nn.Module) -> Tensor:
    """Return what that norm multiplies by, `[D]`: the tensor itself."""
    weight = deferred_norm(decoder).weight
    assert isinstance(weight, Tensor)
    return weight


def previous(states: Tensor, position_ids: Tensor) -> Tensor:
    """Return the state of the token before each, `[B, L, D]`, zero at position 0 of every packed sequence."""
    shifted = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    return shifted * (position_ids > 0).unsqueeze(-1)
