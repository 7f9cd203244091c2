"""Linear layers with weights packed in advance, for float32 and bfloat16 on CPUs.

The plain product repacks the weights at every call, or reads them in an order that few tokens do not profit from.
Packed once, the same copy serves passes of any number of tokens. Verification is a product of a few tokens, and should
take no longer than plain decoding, which is one of a single token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from distillspec.models import product_trial
from distillspec.models.language_model import LanguageModel
from distillspec.models.memory import free_bytes
from distillspec.models.packed_products import DTYPES, PackedProduct

SMALLEST = 1 << 16  # weights with fewer elements stay in the CPU's caches, and packing does not help
FEW_TOKENS = (1, 5, 32)  # plain decoding, verification, a batch
SHARE = 0.5  # of the free memory, at most, for the packed copy


class PackedLinear(nn.Linear):
    """Linear layer that uses the packed copy of its weight."""

    packed: PackedProduct

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[..., out]` of `x [..., in]`."""
        return self.packed(x, self.bias)


class PackedLinears:
    """A packed copy of a model's weights. Where packing does not help, all products are the plain ones.

    `attach` uses it for the model's linear layers, `linear` for the head. Weights must not change while it exists.

    Args:
        exact: products must be right to the dtype's rounding. Drafts may have their weights rounded: what they propose
            is judged by the probabilities that they proposed it with.
        tokens: a pass has about so many, one of these.
    """

    def __init__(self, model: LanguageModel, *, exact: bool = True, tokens: Sequence[int] = FEW_TOKENS) -> None:
        self._layers = [module for module in model.decoder.modules() if type(module) is nn.Linear]
        weights = _unlike([*(layer.weight for layer in self._layers), model.head.weight])
        self.kind = _choose(weights, model, exact, tuple(tokens)) if weights else None
        self._packed = {} if self.kind is None else _pack(weights, self.kind)

    def __bool__(self) -> bool:
        """True if any weight is packed."""
        return bool(self._packed)

    @staticmethod
    def helps(model: LanguageModel) -> bool:
        """Return True if this device and build of torch may have packed products of the model's dtype."""
        return model.device.type == "cpu" and model.dtype in DTYPES and torch.backends.mkldnn.is_available()

    def attach(self) -> None:
        """Let the model's linear layers use the packed weights."""
        for layer in self._layers:
            packed = self._packed.get(layer.weight.data_ptr())
            if packed is not None:
                layer.__class__ = PackedLinear
                layer.__dict__["packed"] = packed  # no buffer: it belongs to no checkpoint

    def detach(self) -> None:
        """Restore the layers' own product and free the packed copy."""
        for layer in self._layers:
            if isinstance(layer, PackedLinear):
                layer.__class__ = nn.Linear  # type: ignore[assignment]
                del layer.__dict__["packed"]
        self._packed.clear()

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the product of `x [..., in]` and the weight, `[..., out]`."""
        packed = self._packed.get(weight.data_ptr())
        return linear(x, weight, bias) if packed is None else packed(x, bias)


def _unlike(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the weights that are large enough to pack, tied ones once."""
    large = {weight.data_ptr(): weight.detach() for weight in weights if weight.numel() >= SMALLEST}
    return list(large.values())


def _pack(weights: Sequence[Tensor], kind: type[PackedProduct]) -> dict[int, PackedProduct]:
    """Return packed copies by the address of the weight. One thread packs a weight, so there are several."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return dict(zip([weight.data_ptr() for weight in weights], threads.map(kind, weights), strict=True))


def _choose(
    weights: Sequence[Tensor], model: LanguageModel, exact: bool, tokens: tuple[int, ...]
) -> type[PackedProduct] | None:
    """Return the fastest kind of product that fits all weights and into the share of the free memory."""
    free = free_bytes(model.device)
    for kind in product_trial.ranked(model.dtype, weights, tokens):
        affordable = free is None or sum(map(kind.size, weights)) <= SHARE * free
        if affordable and all(kind.fits(weight, exact=exact) for weight in weights):
            return kind
    return None
