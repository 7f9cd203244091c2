"""Moves of tokens within slots of a key/value cache: on CPUs all rows and layers in one call of C++ (`places.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

from torch import Tensor

from distillspec.native.library import SOURCES, NotBuilt, library
from distillspec.native.vector_kernel import numbers


class PlaceMoves:
    """Moves tokens of one cache. It keeps how the tensors lie, as long as these are the same."""

    def __init__(self) -> None:
        self._known: list[tuple[int, int]] = []  # addresses and bytes of the tensors
        self._described: Any = None  # see `_described`

    def __call__(self, tensors: Sequence[Tensor], moves: Tensor) -> None:
        """Copy tokens to other places of their slots.

        Args:
            tensors: of the cache, `[slots, heads, places, …]` each.
            moves: `[3, n]` int64 on their device, contiguous: slots, places, and the places to go to. Those of a slot
                ascend, and none goes to a later place.
        """
        known = [(cached.data_ptr(), cached.nbytes) for cached in tensors]
        if known != self._known:
            self._known, self._described = known, _described(tensors)
        if self._described is None:
            slots, sources, targets = moves
            for cached in tensors:
                cached[slots, :, targets] = cached[slots, :, sources]
        else:
            move, layouts = self._described
            move(layouts, len(tensors), moves.data_ptr(), moves.shape[1])


def _described(tensors: Sequence[Tensor]) -> tuple[Any, Any] | None:
    """Return the kernel, and the tensors as it reads them. None: they are on another device, or there is no kernel."""
    if any(cached.device.type != "cpu" or not cached[0, 0].is_contiguous() for cached in tensors):
        return None
    move = place_kernel()
    return None if move is None else (move, numbers([number for cached in tensors for number in _layout(cached)]))


def _layout(cached: Tensor) -> tuple[int, ...]:
    slot_bytes, head_bytes, place_bytes = (cached.itemsize * stride for stride in cached.stride()[:3])
    return cached.data_ptr(), slot_bytes, cached.shape[1], head_bytes, place_bytes


@cache
def place_kernel() -> ctypes._NamedFuncPointer | None:
    """Return the kernel, built on first use. None: there is no compiler, or it does not know the language."""
    try:
        move = library(SOURCES / "places.cpp").move_places
    except NotBuilt:
        return None
    number, pointer = ctypes.c_int64, ctypes.c_void_p
    move.argtypes, move.restype = [pointer, number, pointer, number], None
    return move
