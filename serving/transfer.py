"""Between host and device. Every number that the host reads of a step comes through `to_host`.

On CUDA a read waits for all that was launched before it, so a step affords one. Uploads wait for nothing: they go
through pinned memory. On CPUs both are what they were given.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """The tensor on the CPU; waits for the device."""
    return tensor.cpu()


def to_host_together(tensors: Seq[Tensor]) -> list[Tensor]:
    """Several tensors of one dtype on the CPU, in one read."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [to_host(tensor) for tensor in tensors]
    flat = to_host(torch.cat([tensor.flatten() for tensor in tensors]))
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A tensor on the device from (nested) lists of numbers, or from a tensor on the CPU."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def rows_of(tensor: Tensor, rows: Seq[int]) -> Tensor:
    """Some rows of `tensor [n, …]`, in that order; the tensor itself where that is all of them.

    `index_select` copies whole rows; indexing goes number by number, four times as slow for rows of logits.
    """
    if list(rows) == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, to_device(list(rows), tensor.device))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Launches without a device of their own (Triton's, a graph's capture) go to this one, whatever the thread's is."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
