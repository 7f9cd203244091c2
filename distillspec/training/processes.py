"""Agreements between the processes of a launch. Each is the identity in a single process (`accelerator=None`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

Value = TypeVar("Value")


def process_count(accelerator: Accelerator | None) -> int:
    """Return the number of processes that train together."""
    return 1 if accelerator is None else accelerator.num_processes


def agree(accelerator: Accelerator | None, flag: bool) -> bool:
    """True on every process when `flag` is true on any of them."""
    return total(accelerator, float(flag), largest=True) > 0


def total(accelerator: Accelerator | None, value: float, *, largest: bool = False) -> float:
    """Return the sum (or the largest) of every process's `value`."""
    if accelerator is None or accelerator.num_processes == 1:
        return value
    gathered = _gathered(accelerator, [value])
    return float(gathered.max() if largest else gathered.sum())


def totals(accelerator: Accelerator | None, values: Sequence[float]) -> list[float]:
    """Return each value's sum over the processes, which all give equally many."""
    if accelerator is None or accelerator.num_processes == 1:
        return list(values)
    return [float(value) for value in _gathered(accelerator, values).sum(0)]


def from_main(accelerator: Accelerator, make: Callable[[], Value]) -> Value:
    """Return on every process what `make` gives on the main one, while the others wait.

    The value is pickled, so keep it small.
    """
    if accelerator.num_processes == 1:
        return make()
    box = [make() if accelerator.is_main_process else None]
    broadcast_object_list(box)
    return box[0]  # type: ignore[return-value]


def _gathered(accelerator: Accelerator, values: Sequence[float]) -> torch.Tensor:
    """`[processes, len(values)]` float64."""
    return accelerator.gather(torch.tensor([list(values)], dtype=torch.float64, device=accelerator.device))
