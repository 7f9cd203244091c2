"""The C++ kernel of products and layers over few tokens, and how it wants weights packed."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.models.native import library

SOURCE = Path(__file__).with_name("few_tokens.cpp")
WEIGHTS = {torch.float32: torch.float16, torch.bfloat16: torch.bfloat16}  # dtype of a model → of its packed weights


class VectorKernel(NamedTuple):
    """Functions by dtype of a model.

    lanes: numbers of float32 in a vector. Outputs come in blocks of so many.
    by_pairs: bfloat16 is multiplied in pairs, so inputs come in pairs.
    """

    layers: dict[torch.dtype, ctypes._NamedFuncPointer]
    products: dict[torch.dtype, ctypes._NamedFuncPointer]
    lanes: int
    by_pairs: bool

    def packed(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return a weight `[out, in]` in blocks of `lanes` outputs, input by input, for a model of `dtype`.

        `out` is a multiple of `lanes`.
        """
        blocks = weight.to(WEIGHTS[dtype]).unflatten(0, (-1, self.lanes))
        if dtype == torch.bfloat16 and self.by_pairs:
            return blocks.unflatten(2, (-1, 2)).transpose(1, 2).contiguous()
        return blocks.transpose(1, 2).contiguous()

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
    for function in layers.values():
        function.argtypes = [pointer, number, *[pointer] * 4, number, pointer, real, real, ctypes.c_int]
        function.restype = None
    for function in products.values():
        function.argtypes = [pointer, number, number, pointer, number, pointer, ctypes.c_int]
        function.restype = None
    return VectorKernel(layers, products, found.lanes(), bool(found.by_pairs()))
