"""Transfers between host and device. All device reads of a step go through `to_host`.

On CUDA a read waits for all that was launched before it, so a step affords one. Uploads go through pinned memory and do
not wait. On CPUs both return what they were given. A draft may lie on another device than the target: what one hands to
the other goes through `between`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def to_host(tensor: Tensor) -> Tensor:
    """Return the tensor on the CPU. Waits for the device."""
    return tensor.cpu()


def to_host_together(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return several tensors of one dtype on the CPU, in one device read."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return [to_host(tensor) for tensor in tensors]
    flat = to_host(torch.cat([tensor.flatten() for tensor in tensors]))
    parts = flat.split([tensor.numel() for tensor in tensors])
    return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return a tensor on the device, from (nested) lists of numbers or from a tensor on the CPU. Does not wait."""
    tensor = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload_into(held: Tensor, values: Tensor) -> None:
    """Copy a tensor on the CPU into one on the device. Does not wait."""
    held.copy_(values.pin_memory() if held.device.type == "cuda" else values, non_blocking=True)


def between(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a tensor of the target's device on the draft's, or the other way: the same one if both are one device.

    The host does not wait. Both devices' current streams are ordered by torch.
    """
    return tensor if tensor.device == device else tensor.to(device, non_blocking=True)


def rows_of(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    """Return some rows of `tensor [n, …]`, in that order. All rows in order return the tensor itself.

    `index_select` copies whole rows. Indexing copies number by number, four times as slow for rows of logits.
    """
    if list(rows) == list(range(len(tensor))):
        return tensor
    return tensor.index_select(0, to_device(list(rows), tensor.device))


def on_device(device: torch.device) -> AbstractContextManager[Any]:
    """Make `device` the current one, for launches that name none (Triton kernels, graph capture)."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
