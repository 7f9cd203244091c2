"""The C++ kernel of products, layers and draft loops over few tokens, and how it wants weights packed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from distillspec.native.library import SOURCES, library

SOURCE = SOURCES / "few_tokens.cpp"
WEIGHTS = {torch.float32: torch.float16, torch.bfloat16: torch.bfloat16}  # dtype of a model → of its packed weights


class VectorKernel(NamedTuple):
    """Functions by dtype of a model.

    lanes: numbers of float32 in a vector. Outputs come in blocks of so many.
    by_pairs: bfloat16 is multiplied in pairs, so inputs come in pairs.
    """

    layers: dict[torch.dtype, ctypes._NamedFuncPointer]
    products: dict[torch.dtype, ctypes._NamedFuncPointer]
    steps: dict[torch.dtype, ctypes._NamedFuncPointer]
    lanes: int
    by_pairs: bool

    def packed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight `[out, in]` in blocks of `lanes` outputs, input by input, for a model of `dtype`.

        The last block is filled up with zeros: see `rows`.
        """
        whole = pad(weight.to(WEIGHTS[dtype]), (0, 0, 0, self.rows(len(weight)) - len(weight)))
        blocks = whole.unflatten(0, (-1, self.lanes))
        if dtype == torch.bfloat16 and self.by_pairs:
            return blocks.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
        return blocks.transpose(1, 2).contiguous()

    def rows(self, out: int) -> int:
        """Return the outputs of a packed weight of `out`: those of whole blocks."""
        return -(-out // self.lanes) * self.lanes

    def takes(self, weight: Tensor) -> bool:
        """Return True for a weight that can be packed."""
        return weight.dtype in WEIGHTS and weight.shape[1] % 2 == 0


@cache
def vector_kernel() -> VectorKernel:
    """Return the kernel, built on first use.

    Raises:
        NotBuilt: there is no compiler, or it does not know the language.
    """
    found = library(SOURCE)
    pointer, number, real = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    layers = {torch.float32: found.layers_float32, torch.bfloat16: found.layers_bfloat16}
    products = {torch.float32: found.product_float32, torch.bfloat16: found.product_bfloat16}
    steps = {torch.float32: found.steps_float32, torch.bfloat16: found.steps_bfloat16}
    arguments: dict[str, list[Any]] = {
        "layers": [pointer, number, *[pointer] * 4, number, pointer, real, real, ctypes.c_int],
        "products": [pointer, number, number, pointer, number, pointer, ctypes.c_int],
        "steps": [pointer, number, pointer, pointer, real, real, real, ctypes.c_int],
    }
    for name, functions in (("layers", layers), ("products", products), ("steps", steps)):
        for function in functions.values():
            function.argtypes, function.restype = arguments[name], None
    return VectorKernel(layers, products, steps, found.lanes(), bool(found.by_pairs()))


def numbers(values: Sequence[int]) -> Any:
    """Return numbers and addresses as C++ reads them."""
    return (ctypes.c_int64 * len(values))(*values)
