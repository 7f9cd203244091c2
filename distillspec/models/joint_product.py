"""Layers that read the same input, as one packed product: queries, keys and values, or gate and up.

A product of few tokens takes as long as reading its weight, and then some microseconds to start all threads. A model of
30 layers of seven small products starts them 210 times a token, joined 120 times.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from distillspec.models.packed_products import Product

JOINED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # transformers' names, in the order of the calls


class JointProduct:
    """One product for several layers, computed at the first call with an input and kept until the last layer's.

    Args:
        layers: linear layers of one input, with biases all or none. Their weights must not change.
        pack: packs the joint weight.
    """

    def __init__(self, layers: Sequence[nn.Linear], pack: Callable[[Tensor], Product]) -> None:
        self._sizes = [layer.out_features for layer in layers]
        self._packed = pack(joined([layer.weight.detach() for layer in layers]))
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        self._kept: tuple[Tensor, tuple[Tensor, ...]] | None = None  # input and outputs

    def output(self, index: int, x: Tensor) -> Tensor:
        """Return the output `[..., out]` of the layer at `index` for `x [..., in]`."""
        kept = self._kept
        if kept is None or kept[0] is not x:
            kept = x, self._packed(x, self._bias).split(self._sizes, -1)
        self._kept = None if index + 1 == len(self._sizes) else kept
        return kept[1][index]


class JointLinear(nn.Linear):
    """Linear layer that takes its output from a joint product."""

    joint: JointProduct
    index: int

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[..., out]` of `x [..., in]`."""
        return self.joint.output(self.index, x)


def joined(weights: Sequence[Tensor]) -> Tensor:
    """Return weights `[out, in]` one below another. A single one is no copy."""
    return torch.cat(list(weights)) if len(weights) > 1 else weights[0]


def layers_by_input(model: nn.Module) -> Iterator[tuple[nn.Linear, ...]]:
    """Yield the plain linear layers of a model, those together that read the same input."""
    for module in model.modules():
        unjoined = {name: layer for name, layer in module.named_children() if type(layer) is nn.Linear}
        for names in JOINED:
            layers = tuple(unjoined[name] for name in names if name in unjoined)
            if len(layers) == len(names) and _alike(layers):
                yield layers
                for name in names:
                    del unjoined[name]
        yield from ((layer,) for layer in unjoined.values())


def _alike(layers: Sequence[nn.Linear]) -> bool:
    """Return True if layers can be one product, and no weight is another's too."""
    shapes = {(layer.in_features, layer.weight.dtype, layer.bias is None) for layer in layers}
    return len(shapes) == 1 and len({layer.weight.data_ptr() for layer in layers}) == len(layers)
