"""The draft's output head, applied and differentiated by hand so that chunks share one weight gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.types import OutputHead

_VOCAB_BLOCK = 8192


@dataclass(frozen=True)
class Projection:
    """An `OutputHead` with its weights cast once to the dtype it computes in (autocast's, or their own)."""

    head: OutputHead
    weight: Tensor  # [V, D]
    bias: Tensor | None  # [V]

    @classmethod
    def of(cls, head: OutputHead) -> Projection:
        device = head.weight.device.type
        autocast = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if autocast else head.weight.dtype
        bias = None if head.bias is None else head.bias.detach().to(dtype)
        return cls(head, head.weight.detach().to(dtype), bias)

    def linear(self, hidden: Tensor) -> Tensor:
        """Return the linear part of the logits `[C, V]` of `hidden [C, D]`, in the dtype the head computes in."""
        return torch.nn.functional.linear(hidden.to(self.weight.dtype), self.weight, self.bias)

    def logits(self, linear: Tensor) -> Tensor:
        """Apply scale and softcap as `OutputHead.logits` does, but in float32 and under autograd."""
        if self.head.scale != 1.0:
            linear = linear * self.head.scale
        if self.head.softcap is not None:
            linear = torch.tanh(linear / self.head.softcap) * self.head.softcap
        return linear


class ProjectionGradients:
    """Sums of the gradients over chunks, undivided by any normalizer, so that half precision keeps its range.

    The weight's and bias's sums are float32 even for half-precision weights: hundreds of chunks add to them.
    """

    def __init__(self, hidden: Tensor, projection: Projection, needed: tuple[bool, ...]) -> None:
        weight, bias = projection.head.weight, projection.head.bias
        wide = torch.promote_types(weight.dtype, torch.float32)
        self._projection = projection
        self._dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.hidden = torch.zeros_like(hidden) if needed[0] else None
        self.weight = torch.zeros_like(weight, dtype=wide) if needed[1] else None
        self.bias = torch.zeros_like(bias, dtype=wide) if bias is not None and needed[2] else None

    def add(self, start: int, hidden: Tensor, linear_grad: Tensor) -> None:
        """Add the gradient of one chunk, pushed through the head.

        Args:
            start: position of the chunk's first row.
            hidden: `[C, D]`.
            linear_grad: `[C, V]`, of the linear part of the logits.
        """
        weight = self._projection.weight
        hidden = hidden.to(weight.dtype)
        if self.hidden is not None:
            self.hidden[start : start + hidden.shape[0]] = linear_grad @ weight
        if self.weight is not None and self.weight.dtype == weight.dtype:
            self.weight.addmm_(linear_grad.T, hidden)
        elif self.weight is not None:
            # Block by block: a whole [V, D] product in half precision would be a second gradient in memory.
            for total, part in zip(
                self.weight.split(_VOCAB_BLOCK), linear_grad.split(_VOCAB_BLOCK, dim=1), strict=True
            ):
                total += part.T @ hidden
        if self.bias is not None:
            self.bias += linear_grad.sum(0, dtype=self.bias.dtype)

    def scaled(self, scale: Tensor) -> list[Tensor | None]:
        """Return the gradients of hidden states, weight and bias times `scale`, in their own dtypes. Works in place."""
        grads = (self.hidden, self.weight, self.bias)
        return [
            None if grad is None else grad.mul_(scale).to(dtype)
            for grad, dtype in zip(grads, self._dtypes, strict=True)
        ]
