"""The C++ kernel of products, of a Llama's layers and of drafted trees, and how it wants weights packed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from distillspec.native.library import SOURCES, library

SOURCE = SOURCES / "native_layers.cpp"
CPP = {  # types in C++
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "uint16_t",
    torch.int8: "int8_t",
    torch.uint8: "uint8_t",
}
# Dtype of a model → of its packed weights, where these must be its own.
WEIGHTS = {torch.float32: torch.float16, torch.bfloat16: torch.bfloat16}
# The same for codes with a scale an output: of 8 bits, and of 7 beside bfloat16 in pairs, where 64 is zero.
CODES = {torch.float32: torch.int8, torch.bfloat16: torch.uint8}
LARGEST = {torch.int8: 127, torch.uint8: 63}  # code, from zero
ZERO = {torch.int8: 0, torch.uint8: 64}
ROWS_AT_ONCE = 1024  # of a weight: in float32 they take memory
SHRUNK = (1.0, 0.9, 0.8, 0.7)  # shares of the scale by which no number is cut, which are tried


class Kind(NamedTuple):
    """Dtypes of a model and of its packed weights: those of `WEIGHTS` or of `CODES`."""

    model: torch.dtype
    weights: torch.dtype

    @property
    def macros(self) -> tuple[str, str]:
        """Macros of the kernel's source."""
        return f"MODEL={CPP[self.model]}", f"WEIGHTS={CPP[self.weights]}"


class OfKinds(dict[Kind, Any]):
    """A function of the kernel for each kind of model. It is built when first asked for, in a quarter of a minute.

    Raises NotBuilt then, if there is no compiler, or it does not know the language.
    """

    def __init__(self, name: str, arguments: Sequence[Any]) -> None:
        super().__init__()
        self.name, self.arguments = name, arguments

    def __missing__(self, kind: Kind) -> Any:
        function = library(SOURCE, *kind.macros)[self.name]
        function.argtypes, function.restype = self.arguments, None
        self[kind] = function
        return function


class VectorKernel(NamedTuple):
    """Functions by kind of a model, products by dtype of their inputs.

    lanes: numbers of float32 in a vector. Outputs come in blocks of so many.
    by_pairs: bfloat16 is multiplied in pairs, so inputs come in pairs.
    """

    layers: OfKinds
    products: dict[torch.dtype, ctypes._NamedFuncPointer]
    steps: OfKinds
    lanes: int
    by_pairs: bool

    def build(self, kind: Kind) -> None:
        """Build the functions of a kind, if they are not there yet.

        Raises:
            NotBuilt: there is no compiler, or it does not know the language.
        """
        for functions in (self.layers, self.steps):
            functions[kind]

    def packed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight `[out, in]` in blocks of `lanes` outputs, input by input, as numbers of `dtype`.

        The last block is filled up with zeros: see `rows`. Codes: bytes, those of the outputs' float32 scales last.
        """
        whole = pad(weight, (0, 0, 0, self.rows(len(weight)) - len(weight)))
        if dtype in LARGEST:
            assert whole.shape[1] % self.lanes == 0, "codes are read by whole vectors"
            codes, scales = coded(whole, dtype)
            return torch.cat([self._in_blocks(codes).flatten().view(torch.uint8), scales.view(torch.uint8)])
        return self._in_blocks(whole.to(dtype))

    def _in_blocks(self, whole: Tensor) -> Tensor:
        blocks = whole.unflatten(0, (-1, self.lanes))
        if whole.dtype in (torch.bfloat16, torch.uint8) and self.by_pairs:
            return blocks.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
        return blocks.transpose(1, 2).contiguous()

    def rows(self, out: int) -> int:
        """Return the outputs of a packed weight of `out`: those of whole blocks."""
        return -(-out // self.lanes) * self.lanes

    def codes(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of the fewest bits that weights of a model may be rounded to."""
        return CODES[dtype] if dtype == torch.float32 or self.by_pairs else WEIGHTS[dtype]

    def takes(self, weight: Tensor) -> bool:
        """Return True for a weight that can be packed."""
        return weight.dtype in WEIGHTS and weight.shape[1] % 2 == 0


@cache
def vector_kernel() -> VectorKernel:
    """Return the kernel, built on first use.

    Raises:
        NotBuilt: there is no compiler, or it does not know the language.
    """
    built = library(SOURCES / "products.cpp")
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    products = {torch.float32: built.product_float32, torch.bfloat16: built.product_bfloat16}
    for product in products.values():
        product.argtypes, product.restype = [pointer, number, number, pointer, number, pointer, ctypes.c_int], None
    layers = [pointer, number, *[pointer] * 4, number, pointer, pointer, real, real, ctypes.c_int]
    steps = [pointer, number, *[pointer] * 3, real, real, real, ctypes.c_int]
    return VectorKernel(
        OfKinds("layers", layers), products, OfKinds("steps", steps), built.lanes(), bool(built.by_pairs())
    )


def coded(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return a weight `[out, in]` as codes of `CODES` and scales `[out]` float32.

    A row is its codes, less the code of zero, times its scale: of some scales that with the least squared error.
    """
    parts = [_coded(part, dtype) for part in weight.split(ROWS_AT_ONCE)]
    codes, scales = (torch.cat(pieces) for pieces in zip(*parts, strict=True))
    return codes, scales


def _coded(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    real, most = weight.float(), LARGEST[dtype]
    widest = real.abs().amax(1).div(most).clamp(min=torch.finfo(torch.float32).tiny)
    tried = [widest * share for share in SHRUNK]
    errors = [(_rounded(real, scales, most) * scales[:, None] - real).square().sum(1) for scales in tried]
    scales = torch.stack(tried).gather(0, torch.stack(errors).argmin(0, keepdim=True))[0]
    return (_rounded(real, scales, most) + ZERO[dtype]).to(dtype), scales


def _rounded(weight: Tensor, scales: Tensor, most: int) -> Tensor:
    return (weight / scales[:, None]).round().clamp(-most, most)


def numbers(values: Sequence[int]) -> Any:
    """Return numbers and addresses as C++ reads them."""
    return (ctypes.c_int64 * len(values))(*values)


def drawn_from(probs: Tensor | None, row: int, ids: Tensor | None) -> tuple[int, int, int]:
    """Return the addresses of a row of probabilities and of its ids, and its width. Zeros for none."""
    if probs is None:
        return 0, 0, 0
    address = probs.data_ptr() + row * probs.stride(0) * probs.element_size()
    return address, 0 if ids is None else ids.data_ptr(), probs.shape[1]
