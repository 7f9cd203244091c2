"""Products of tokens with a weight that was packed in advance, on CPUs. Each kind is one library's."""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import count
from typing import Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from distillspec.models.half_weights import fits_half, half_scale
from distillspec.models.large_pages import kept_alone
from distillspec.native.library import NotBuilt
from distillspec.native.vector_kernel import WEIGHTS, vector_kernel

DTYPES = (torch.float32, torch.bfloat16)
TYPICAL_TOKENS = 16  # oneDNN chooses a layout for so many tokens. From 8 on it is the same


class Product(Protocol):
    """A packed weight `[out, in]` that multiplies."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return `x [..., in]` times the weight plus the bias, `[..., out]` in the dtype of `x`."""
        ...


class PackedProduct(Product, Protocol):
    """A kind of product, made of a weight `[out, in]`.

    Raises:
        RuntimeError: by the constructor, the CPU or the build of torch cannot multiply so.
    """

    name: str  # for the log

    def __init__(self, weight: Tensor) -> None: ...

    @staticmethod
    def size(weight: Tensor) -> int:
        """Return the bytes of the packed copy."""
        ...

    @staticmethod
    def fits(weight: Tensor, *, exact: bool) -> bool:
        """Return True if the weight can be packed, with `exact` only if products keep the dtype's precision."""
        ...


class OneDnnProduct:
    """oneDNN's layout, in the weight's own dtype."""

    name = "oneDNN"

    def __init__(self, weight: Tensor) -> None:
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), TYPICAL_TOKENS)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        # Compilers see one operator of ours, for inductor's own lowering wants constant weights.
        if torch.compiler.is_dynamo_compiling():
            out: Tensor = torch.ops.distillspec.onednn_linear(x, self._packed, bias)
            return out
        return _onednn_linear(x, self._packed, bias)

    @staticmethod
    def size(weight: Tensor) -> int:
        return weight.numel() * weight.element_size()

    @staticmethod
    def fits(weight: Tensor, *, exact: bool) -> bool:
        return True


class OpaqueProduct(ABC):
    """A product that compilers take for one operator, whatever it does inside.

    Args:
        out: width of the result.
    """

    def __init__(self, out: int) -> None:
        self._out = out
        number = next(_numbers)
        _alive[number] = self
        self._number = torch.tensor(number)  # compilers take tensors, and no packed objects

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if torch.compiler.is_dynamo_compiling():
            out: Tensor = torch.ops.distillspec.packed_linear(x, self._number, bias, self._out)
            return out
        return self.multiply(x, bias)

    @abstractmethod
    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Return the product, outside of compilers."""


class SixteenBits(OpaqueProduct):
    """A product whose packed weight has numbers of 16 bits."""

    @staticmethod
    def size(weight: Tensor) -> int:
        return 2 * weight.numel()


class HalfProduct(SixteenBits):
    """FBGEMM's layout, in float16, with products and sums in float32.

    It reads half the bytes of float32 (`half_weights.py`).
    """

    name = "FBGEMM in float16"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(len(weight))
        weight = weight.detach().float()
        self._scale = half_scale(weight)
        self._packed: Any = torch.ops.quantized.linear_prepack_fp16((weight * self._scale).contiguous(), None)

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        scaled = x.float() if self._scale == 1.0 else x.float() / self._scale
        out: Tensor = torch.ops.quantized.linear_dynamic_fp16(scaled, self._packed)
        out = out.to(x.dtype)
        return out if bias is None else out + bias

    @staticmethod
    def fits(weight: Tensor, *, exact: bool) -> bool:
        return fits_half(weight, exact=exact)


class VectorProduct(SixteenBits):
    """Our own layout in 16 bits, for few tokens (`products.cpp`). Products of bfloat16 or float32, sums in float32.

    A float32 weight is float16 here, scaled as in `HalfProduct`.
    """

    name = "our own kernel"

    def __init__(self, weight: Tensor) -> None:
        super().__init__(len(weight))
        try:
            self._kernel = vector_kernel()
        except NotBuilt as error:
            raise RuntimeError(str(error)) from error
        if not self._kernel.takes(weight):
            raise RuntimeError(f"weights of {weight.shape[1]} inputs are not made of pairs")
        self._scale = half_scale(weight.detach()) if weight.dtype == torch.float32 else 1.0
        scaled = weight.detach() * self._scale if self._scale != 1.0 else weight.detach()
        self._packed = kept_alone(self._kernel.packed(scaled, WEIGHTS[weight.dtype]))
        self._rows = self._kernel.rows(len(weight))
        self._multiply = self._kernel.products[weight.dtype]

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        read = (x if self._scale == 1.0 else x / self._scale).contiguous()
        padded = read.new_empty(*x.shape[:-1], self._rows)
        tokens = read.numel() // max(1, read.shape[-1])
        packed = self._packed.data_ptr(), self._rows, read.shape[-1]
        self._multiply(*packed, read.data_ptr(), tokens, padded.data_ptr(), torch.get_num_threads())
        out = padded if self._rows == self._out else padded[..., : self._out].contiguous()
        return out if bias is None else out + bias

    @staticmethod
    def fits(weight: Tensor, *, exact: bool) -> bool:
        # The trial has shown that there is a kernel.
        return vector_kernel().takes(weight) and (weight.dtype == torch.bfloat16 or fits_half(weight, exact=exact))


KINDS: tuple[type[PackedProduct], ...] = (OneDnnProduct, HalfProduct, VectorProduct)

_numbers = count()
_alive: WeakValueDictionary[int, OpaqueProduct] = WeakValueDictionary()


def _onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _packed_linear(x: Tensor, number: Tensor, bias: Tensor | None, out: int) -> Tensor:
    return _alive[int(number)].multiply(x, bias)


_library = torch.library.Library("distillspec", "FRAGMENT")
_library.define("onednn_linear(Tensor x, Tensor packed, Tensor? bias) -> Tensor")
_library.define("packed_linear(Tensor x, Tensor number, Tensor? bias, int out) -> Tensor")
_library.impl("onednn_linear", _onednn_linear, "MkldnnCPU")  # the dispatch key of packed weights
_library.impl("packed_linear", _packed_linear, "CPU")


@torch.library.register_fake("distillspec::onednn_linear", lib=_library)
def _onednn_linear_shape(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    return x.new_empty(*x.shape[:-1], packed.shape[0])


@torch.library.register_fake("distillspec::packed_linear", lib=_library)
def _packed_linear_shape(x: Tensor, number: Tensor, bias: Tensor | None, out: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out)
