"""Linear layers with weights packed in advance by oneDNN, for float32 and bfloat16 on CPUs.

The plain product repacks the weights at every call, or reads them in an order that few tokens do not profit from.
Packed once, the same copy serves passes of any number of tokens. With SmolLM2 on two cores a product of five tokens
takes 0.4 of the plain time in float32 and 0.6 in bfloat16, and no longer than one of a single token. Verification is
that product.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from statistics import median

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from distillspec.errors import in_one_line
from distillspec.models import LanguageModel
from distillspec.models.memory import free_bytes

log = logging.getLogger(__name__)

SMALLEST = 1 << 16  # weights with fewer elements stay in the CPU's caches, and packing does not help
SHARE = 0.5  # of the free memory, at most, for the packed copy
DTYPES = (torch.float32, torch.bfloat16)
TYPICAL_TOKENS = 16  # oneDNN chooses a layout for so many tokens. From 8 on it is the same
TRIED_TOKENS = (1, 5, 32)  # plain decoding, verification, a batch
TRIED_BYTES = 1 << 26  # weights to try on: more than the caches hold
ROUNDS = 5


class PackedLinear(nn.Linear):
    """Linear layer that uses the packed copy of its weight."""

    packed: Tensor

    def forward(self, x: Tensor) -> Tensor:
        """Return the product `[..., out]` of `x [..., in]`."""
        return product(x, self.packed, self.bias)


class PackedLinears:
    """A packed copy of a model's weights. Where packing does not help, all products are the plain ones.

    `attach` uses it for the model's linear layers, `linear` for the head. Weights must not change while it exists.
    """

    def __init__(self, model: LanguageModel) -> None:
        self._layers = [module for module in model.decoder.modules() if type(module) is nn.Linear]
        weights = _unlike([*(layer.weight for layer in self._layers), model.head.weight])
        self._packed = (
            pack(weights) if _affordable(weights, model.device) and packing_is_faster(model.dtype, weights) else {}
        )

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
        return linear(x, weight, bias) if packed is None else product(x, packed, bias)


def product(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `x [..., in]` times packed weights plus the bias, `[..., out]` in the dtype of `x`.

    Compilers see one operator of ours, for inductor's own lowering wants constant weights.
    """
    if torch.compiler.is_dynamo_compiling():
        out: Tensor = torch.ops.distillspec.packed_linear(x, packed, bias)
        return out
    result: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


_library = torch.library.Library("distillspec", "FRAGMENT")
_library.define("packed_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")


@torch.library.impl(_library, "packed_linear", "MkldnnCPU")  # the dispatch key of packed weights
def _packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")


@torch.library.register_fake("distillspec::packed_linear", lib=_library)
def _packed_linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


def _unlike(weights: Iterable[Tensor]) -> list[Tensor]:
    """Return the weights that are large enough to pack, tied ones once."""
    large = {weight.data_ptr(): weight.detach() for weight in weights if weight.numel() >= SMALLEST}
    return list(large.values())


def pack(weights: Sequence[Tensor]) -> dict[int, Tensor]:
    """Return packed copies by the address of the weight."""
    return {
        weight.data_ptr(): torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_TOKENS)
        for weight in weights
    }


def _affordable(weights: Sequence[Tensor], device: torch.device) -> bool:
    """Return True if there is something to pack, and a copy fits into the share of the free memory."""
    free = free_bytes(device)
    size = sum(weight.numel() * weight.element_size() for weight in weights)
    return bool(weights) and (free is None or size <= SHARE * free)


def packing_is_faster(dtype: torch.dtype, weights: Sequence[Tensor]) -> bool:
    """Return True if packed products are faster here, tried once a process, dtype and number of threads."""
    key = (dtype, torch.get_num_threads())
    if key not in _tried:
        _tried[key] = _try(weights)
    return _tried[key]


def forget_trials() -> None:
    """Try again at the next model: tests change what is tried."""
    _tried.clear()


_tried: dict[tuple[torch.dtype, int], bool] = {}


def _try(weights: Sequence[Tensor]) -> bool:
    """Time plain and packed products in turn, over weights that the caches do not hold, and log the outcome."""
    ends = accumulate(weight.numel() * weight.element_size() for weight in weights)
    tried = [weight.detach() for weight, end in zip(weights, ends, strict=True) if end <= TRIED_BYTES] or weights[:1]
    try:
        packed = list(pack(tried).values())
        ratio = median([_ratio(tried, packed, tokens) for tokens in TRIED_TOKENS])
    except RuntimeError as error:  # the CPU has no instructions for it
        log.info("weights are not packed: %s", in_one_line(error))
        return False
    log.info("packed products take %.2f times the plain ones' time here", ratio)
    return ratio < 1


def _ratio(weights: Sequence[Tensor], packed: Sequence[Tensor], tokens: int) -> float:
    """Return packed over plain time for a pass over `tokens` tokens, the median of rounds."""
    inputs = {weight.shape[1]: weight.new_ones(tokens, weight.shape[1]) for weight in weights}
    ratios = []
    for _ in range(ROUNDS):
        plain_s = seconds(lambda: [linear(inputs[weight.shape[1]], weight) for weight in weights])
        packed_s = seconds(lambda: [product(inputs[weight.shape[1]], weight) for weight in packed])
        ratios.append(packed_s / plain_s)
    return median(ratios)


def seconds(run: Callable[[], object]) -> float:
    """Time a call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
