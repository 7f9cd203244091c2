"""Small agreements between the processes of a launch; alone, each is the identity."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list

Value = TypeVar("Value")


def agree(accelerator: Accelerator, flag: bool) -> bool:
    """True everywhere when any process says so."""
    return total(accelerator, float(flag), largest=True) > 0


def total(accelerator: Accelerator, value: float, *, largest: bool = False) -> float:
    """The sum (or the largest) of every process's value."""
    if accelerator.num_processes == 1:
        return value
    gathered = _gathered(accelerator, [value])
    return float(gathered.max() if largest else gathered.sum())


def totals(accelerator: Accelerator, values: Sequence[float]) -> list[float]:
    """The sum over processes of each value; all give as many."""
    if accelerator.num_processes == 1:
        return list(values)
    return [float(value) for value in _gathered(accelerator, values).sum(0)]


def from_main(accelerator: Accelerator, make: Callable[[], Value]) -> Value:
    """What the main process makes, on every process; the others wait. Pickled, so of modest size."""
    if accelerator.num_processes == 1:
        return make()
    box = [make() if accelerator.is_main_process else None]
    broadcast_object_list(box)
    return box[0]  # type: ignore[return-value]


def _gathered(accelerator: Accelerator, values: Sequence[float]) -> torch.Tensor:
    """`[processes, len(values)]` float64."""
    return accelerator.gather(torch.tensor([list(values)], dtype=torch.float64, device=accelerator.device))
