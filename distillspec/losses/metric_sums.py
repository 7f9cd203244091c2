"""Weighted sums of a mix of losses over blocks of positions."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from distillspec.losses.inputs import LossInputs
from distillspec.losses.mix import LossMix
from distillspec.losses.registry import acceptance_of, per_token_loss


@dataclass
class MetricSums:
    """Weighted sums of the losses in `mix` and of α, added up block by block. `ChunkedLoss` describes the names."""

    mix: LossMix
    weights: Tensor  # [T] float32
    values: dict[str, Tensor] = field(default_factory=dict)
    accepted: list[Tensor] = field(default_factory=list)  # α of each block's positions, in their order

    def __post_init__(self) -> None:
        zero = torch.zeros((), device=self.weights.device)
        names = ["weight", "valid_weight", "loss", "outside"]
        names += [name + suffix for name in self.mix.names for suffix in ("", "_weight")]
        self.values.update(dict.fromkeys(names, zero))

    def add(self, inputs: LossInputs, start: int, stop: int) -> Tensor:
        """Add the block from `start` to `stop`, and return its Σ weights · mix, differentiable in its draft logits."""
        weights = self.weights[start:stop]
        mixed, outside = torch.zeros_like(weights), None
        defined = torch.zeros_like(weights, dtype=torch.bool)
        for term in self.mix.terms:
            result = per_token_loss(term.name, inputs, **term.params)
            mixed = mixed + term.weight * result.values
            defined = defined | result.valid
            if outside is None or term.name != "ce":  # ce has it for one token, the others for the distribution
                outside = result.outside
            self._sum(term.name, weights * result.values)
            self._sum(f"{term.name}_weight", weights * result.valid)
        total = (weights * mixed).sum()
        alpha = acceptance_of(inputs)
        if alpha is not None:
            self._sum("alpha", weights * alpha)
            self.accepted.append(alpha)
        assert outside is not None, "a mix has at least one term"
        self._sum("outside", weights * outside)
        self._sum("weight", weights)
        self._sum("valid_weight", weights * defined)
        self._sum("loss", total)
        return total

    def denominator(self, normalizer: Tensor | float | None) -> Tensor:
        """Return `normalizer`, by default the weights at defined positions, at least the smallest normal float32."""
        if normalizer is None:
            normalizer = self.values["valid_weight"]
        given = torch.as_tensor(normalizer, dtype=torch.float32, device=self.weights.device)
        return given.clamp(min=torch.finfo(torch.float32).tiny)

    def _sum(self, name: str, values: Tensor) -> None:
        self.values[name] = self.values.get(name, 0) + values.detach().sum()
