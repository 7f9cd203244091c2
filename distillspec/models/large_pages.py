"""Weights in memory of large pages, where the system has them: reading all of a model misses the TLB less often.

Linux only. Elsewhere weights stay where they are.
"""

from __future__ import annotations

import mmap
import sys
from contextlib import suppress

import torch
from torch import Tensor

LARGE = 2 << 20  # bytes of a large page
BLOCK = 64 << 20  # bytes that are asked for at once. The system commits them as they are written
ALONE = 8 * LARGE  # bytes of a tensor that is worth pages of its own
ALIGNED = 64  # each tensor begins at a line of the cache


class LargePages:
    """Holds tensors on the CPU one behind another. Its memory is freed with the last of them.

    Args:
        size: bytes of a block, of which there are as many as are needed.
    """

    def __init__(self, size: int = BLOCK) -> None:
        self._size = size
        self._block: mmap.mmap | None = None
        self._next = self._end = 0  # bytes from the block's begin

    def keep(self, tensor: Tensor) -> Tensor:
        """Return a contiguous copy of a tensor. Without Linux, or where memory is refused, return the tensor itself."""
        if sys.platform != "linux" or tensor.device.type != "cpu" or tensor.numel() == 0:
            return tensor
        if self._block is None or self._next + tensor.nbytes > self._end:
            try:
                self._begin_block(max(tensor.nbytes, self._size))
            except OSError:
                return tensor
        assert self._block is not None
        room = torch.frombuffer(self._block, dtype=tensor.dtype, count=tensor.numel(), offset=self._next)
        self._next += -(-tensor.nbytes // ALIGNED) * ALIGNED
        return room.view(tensor.shape).copy_(tensor)

    def _begin_block(self, least: int) -> None:
        size = -(-least // LARGE) * LARGE
        self._block = mmap.mmap(-1, size + LARGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):  # a system without them
            self._block.madvise(mmap.MADV_HUGEPAGE)
        begin = torch.frombuffer(self._block, dtype=torch.uint8, count=1).data_ptr()
        self._next = -begin % LARGE
        self._end = self._next + size


def kept_alone(tensor: Tensor) -> Tensor:
    """Return a tensor on large pages of its own, itself if it would leave much of them empty."""
    return LargePages(tensor.nbytes).keep(tensor) if tensor.nbytes >= ALONE else tensor
