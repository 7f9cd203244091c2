"""Attention of few queries a row on CPUs: a C++ kernel over each row's own keys, and masks for prompts.

torch's attention computes one to five queries a row as matrix products, which such shapes do not fill, and it reads as
many keys for all rows as the longest has.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import NamedTuple

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillspec.models.slot_cache import Attend, SlotView, masked_attention
from distillspec.native.library import SOURCES, NotBuilt, library
from distillspec.native.vector_kernel import numbers

SOURCE = SOURCES / "few_queries.cpp"
MOST_QUERIES = {16: 16, 8: 8}  # lanes of a vector → tokens a row up to which it was faster than torch (lab notes)


class _Kernel(NamedTuple):
    functions: dict[torch.dtype, ctypes._NamedFuncPointer]
    lanes: int  # the numbers of a head must fill whole vectors


@cache
def _kernel() -> _Kernel:
    """Return the kernel. Built on first use, which takes seconds where this machine has never done it.

    Raises:
        NotBuilt: there is no compiler, or it does not know the language.
    """
    kernels = library(SOURCE)
    functions = {torch.float32: kernels.attend_float32, torch.bfloat16: kernels.attend_bfloat16}
    for function in functions.values():
        function.argtypes, function.restype = [ctypes.c_void_p] * 6 + [ctypes.c_float, ctypes.c_int], None
    return _Kernel(functions, kernels.lanes())


def why_not() -> str | None:
    """Return the reason why there is no kernel here, None if there is one."""
    try:
        _kernel()
    except NotBuilt as error:
        return str(error)
    return None


def few_queries_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    view: SlotView,
    scaling: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attend with float32 scores and sums, in float32 and bfloat16. See `distillspec.models.slot_cache.Attend`.

    Prompts, wide trees, other dtypes, soft caps and narrow windows are left to `masked_attention`.
    """
    keys, values, view = view.cache.unpaged(keys, values, view)
    if softcap is not None or not _takes(query, keys, values, view, window):
        return masked_attention(query, keys, values, view, scaling, window, softcap)
    batch, heads, tokens, dim = query.shape
    out = query.new_empty(batch, tokens, heads, dim)
    shape = (*query.shape, keys.shape[1], *query.stride()[:3], *keys.stride()[:3])
    _kernel().functions[query.dtype](
        query.data_ptr(),
        keys.data_ptr(),
        values.data_ptr(),
        out.data_ptr(),
        view.kept(("rows", window), lambda: torch.from_numpy(row_numbers(view, window))).data_ptr(),
        numbers(shape),
        dim**-0.5 if scaling is None else scaling,
        torch.get_num_threads(),
    )
    return out


def _takes(query: Tensor, keys: Tensor, values: Tensor, view: SlotView, window: int | None) -> bool:
    """Return True if the kernel is made for such tensors."""
    kernel, tokens = _kernel(), query.shape[2]
    return (
        query.device.type == "cpu"
        and query.dtype in kernel.functions
        and query.dtype == keys.dtype
        and tokens <= MOST_QUERIES[kernel.lanes]
        and query.shape[3] % kernel.lanes == 0
        and query.stride(3) == keys.stride(3) == 1
        and keys.stride() == values.stride()
        and (window is None or window > tokens)
    )


def row_numbers(view: SlotView, window: int | None) -> NDArray[numpy.int64]:
    """Return `[B, 3 + 2 q]`: slot, first new place, end, and of each query the first key and the new tokens it sees."""
    places, positions = view.places.numpy(), view.positions.numpy()
    real = places < view.cache.max_len
    count, q = real.sum(1, keepdims=True), places.shape[1]
    base = numpy.where(count > 0, places[:, :1], 0)
    first = numpy.zeros_like(places) if window is None else (positions - window + 1).clip(0)
    chain = (2 << numpy.arange(q)) - 1
    nodes = numpy.broadcast_to(chain, places.shape) if view.ancestors is None else view.ancestors[..., 0].numpy()
    nodes = nodes & ((1 << count) - 1)
    return numpy.concatenate([view.slots.numpy()[:, None], base, base + count, first, nodes], 1)


def attention_on(device: torch.device) -> Attend:
    """Return the attention for decoding on a device: the kernel on CPUs where it can be built, else masks."""
    return few_queries_attention if device.type == "cpu" and why_not() is None else masked_attention
