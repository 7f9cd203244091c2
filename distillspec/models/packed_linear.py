"""Linear layers with weights packed in advance, for float32 and bfloat16 on CPUs.

The plain product repacks the weights at every call, or reads them in an order that few tokens do not profit from.
Packed once, the same copy serves passes of any number of tokens. Verification is a product of a few tokens, and should
take no longer than plain decoding, which is one of a single token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from distillspec.models.joint_product import JointLinear, JointProduct, joined, layers_by_input
from distillspec.models.language_model import LanguageModel
from distillspec.models.memory import free_bytes
from distillspec.models.packed_products import DTYPES, Product
from distillspec.models.packing import Packing, packings

SMALLEST = 1 << 16  # weights with fewer elements stay in the CPU's caches, and packing does not help
SHARE = 0.5  # of the free memory, at most, for the packed copy

Item = TypeVar("Item")
Packed = TypeVar("Packed")


class PackedLinear(nn.Linear):
    """Linear layer that uses the packed copy of its weight."""

    packed: Product

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[..., out]` of `x [..., in]`."""
        return self.packed(x, self.bias)


class PackedLinears:
    """A packed copy of a model's weights. Where packing does not help, all products are the plain ones.

    `attach` uses it for the model's linear layers, `linear` for the head. Layers that read the same input are packed as
    one (`JointProduct`). Weights must not change while it exists.

    Args:
        exact: products must be right to the dtype's rounding. Drafts may have their weights rounded: what they propose
            is judged by the probabilities that they proposed it with.
        tokens: typical numbers of tokens of a pass. None: few or many.
    """

    def __init__(self, model: LanguageModel, *, exact: bool = True, tokens: Sequence[int] | None = None) -> None:
        input_modules = () if model.state_input is None else model.state_input.modules()
        groups = [*layers_by_input(model.decoder), *([part] for part in input_modules if isinstance(part, nn.Linear))]
        self._groups: list[Sequence[nn.Linear]] = [layers for layers in groups if _size(layers) >= SMALLEST]
        parts = _parts(self._groups, model.head.weight.detach())
        self.packing = _choose(parts, model, exact, tokens) if parts else None
        joint = [layers for layers in self._groups if len(layers) > 1]
        self._joint: dict[nn.Linear, JointProduct] = {}  # by a group's first layer
        self._packed: dict[int, Product] = {}  # of weights by themselves, by their address
        if self.packing is not None:
            pack, alone = self.packing.pack, {part[0].data_ptr(): part[0] for part in parts if len(part) == 1}
            products = _each(lambda layers: JointProduct(layers, pack), joint)
            self._joint = {layers[0]: product for layers, product in zip(joint, products, strict=True)}
            self._packed = dict(zip(alone, _each(pack, alone.values()), strict=True))

    def __bool__(self) -> bool:
        """True if any weight is packed."""
        return bool(self._packed or self._joint)

    @staticmethod
    def helps(model: LanguageModel) -> bool:
        """Return True if this device and build of torch may have packed products of the model's dtype."""
        return model.device.type == "cpu" and model.dtype in DTYPES and torch.backends.mkldnn.is_available()

    def attach(self) -> None:
        """Let the model's linear layers use the packed weights."""
        for layers in self._groups:
            packed, joint = self._packed.get(layers[0].weight.data_ptr()), self._joint.get(layers[0])
            for index, layer in enumerate(layers):
                # Not as buffers: they belong to no checkpoint.
                if joint is not None:
                    layer.__class__ = JointLinear
                    layer.__dict__.update(joint=joint, index=index)
                elif packed is not None:
                    layer.__class__ = PackedLinear
                    layer.__dict__["packed"] = packed

    def detach(self) -> None:
        """Restore the layers' own product and free the packed copy."""
        for layer in (layer for layers in self._groups for layer in layers):
            if isinstance(layer, PackedLinear | JointLinear):
                layer.__class__ = nn.Linear  # type: ignore[assignment]
                for name in ("packed", "joint", "index"):
                    layer.__dict__.pop(name, None)
        self._packed.clear()
        self._joint.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of `x [..., in]` and the weight, `[..., out]`."""
        packed = self._packed.get(weight.data_ptr())
        return linear(x, weight, bias) if packed is None else packed(x, bias)


def _size(layers: Sequence[nn.Linear]) -> int:
    return sum(layer.weight.numel() for layer in layers)


def _parts(groups: Iterable[Sequence[nn.Linear]], head: Tensor) -> list[tuple[Tensor, ...]]:
    """Return the weights to pack, those of one product together. Tied ones come once, the head last."""
    parts = [tuple(layer.weight.detach() for layer in layers) for layers in groups]
    if head.numel() >= SMALLEST:
        parts.append((head,))
    return list({part[0].data_ptr(): part for part in parts}.values())


def _each(pack: Callable[[Item], Packed], items: Iterable[Item]) -> list[Packed]:
    """Pack all items. One thread packs a weight, so there are several."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(pack, items))


def _choose(
    parts: Sequence[tuple[Tensor, ...]], model: LanguageModel, exact: bool, tokens: Sequence[int] | None
) -> Packing | None:
    """Return the fastest packing that fits all weights and into the share of the free memory."""
    free = free_bytes(model.device)
    for packing in packings(model.dtype, map(joined, parts), tokens):
        affordable = free is None or sum(packing.size(weight) for part in parts for weight in part) <= SHARE * free
        if affordable and all(packing.fits(joined(part), exact=exact) for part in parts):
            return packing
    return None
