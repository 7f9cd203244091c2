"""Zeros in memory that the system commits page by page as it is written, and takes back when it is given back.

Linux only. A page that was only read, or was given back, reads as zeros and takes no memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

NO_RESERVE = 0x4000  # of Linux's mman.h, which Python's mmap does not name
STRICT = "2"  # the system counts all memory that is asked for, used or not


def commits_lazily(device: torch.device) -> bool:
    """Return True if `lazy_zeros` works for tensors of the device."""
    return device.type == "cpu" and sys.platform == "linux" and _overcommit() != STRICT


def lazy_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Return zeros on the CPU that begin at a page and take no memory until they are written."""
    count = math.prod(shape)
    block = mmap.mmap(-1, max(1, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE)
    with suppress(OSError):  # a system without huge pages
        block.madvise(mmap.MADV_NOHUGEPAGE)  # else one token may commit 2 MiB
    return torch.frombuffer(block, dtype=dtype, count=count).view(*shape)


@torch.inference_mode()
def give_back(part: Tensor) -> None:
    """Zero a contiguous part of `lazy_zeros`. Its whole pages take no memory until they are written again."""
    flat = part.view(-1)
    begin = part.data_ptr()
    end = part.data_ptr() + part.nbytes
    first, last = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last or _libc().madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED) != 0:
        flat.zero_()
        return
    flat[: (first - begin) // part.itemsize].zero_()
    flat[(last - begin) // part.itemsize :].zero_()


def tokens_a_page(bytes_per_token: int) -> int:
    """Return how many tokens of so many bytes, one after another, begin in one page."""
    return -(-mmap.PAGESIZE // bytes_per_token)


def _overcommit(file: Path = Path("/proc/sys/vm/overcommit_memory")) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None)
