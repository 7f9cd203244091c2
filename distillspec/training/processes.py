"""Small agreements between the processes of a launch; alone, each is the identity."""

from __future__ import annotations

import torch
from accelerate import Accelerator


def agree(accelerator: Accelerator, flag: bool) -> bool:
    """True everywhere when any process says so."""
    return total(accelerator, float(flag), largest=True) > 0


def total(accelerator: Accelerator, value: float, *, largest: bool = False) -> float:
    """The sum (or the largest) of every process's value."""
    if accelerator.num_processes == 1:
        return value
    gathered = accelerator.gather(torch.tensor([value], dtype=torch.float64, device=accelerator.device))
    return float(gathered.max() if largest else gathered.sum())
