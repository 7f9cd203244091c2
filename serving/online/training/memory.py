"""Memory of learning, from one update to the next: the optimizer's moments and steps, and weights in float32.

A fresh optimizer spends its first steps finding the gradients' sizes, which is most of a small update. The candidate's
folder has weights of 16 bits. Small changes would be lost if the next update began with those.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from distillspec.files import write_private

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """State of learning after an update."""

    steps: int  # since the lineage began
    optimizer: dict[str, Any]
    weights: dict[str, Tensor]  # float32, of the parameters that learn

    @classmethod
    def of(cls, steps: int, optimizer: Optimizer, module: nn.Module) -> Memory:
        """Take the state of an update that has ended."""
        weights = {name: p.detach().clone() for name, p in module.named_parameters() if p.requires_grad}
        return cls(steps, optimizer.state_dict(), weights)

    def restore(self, optimizer: Optimizer, module: nn.Module) -> bool:
        """Continue from here. Return False, and change nothing, if the draft learns with other parameters."""
        learning = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if {n: w.shape for n, w in self.weights.items()} != {n: p.shape for n, p in learning.items()}:
            return False
        try:
            optimizer.load_state_dict(self.optimizer)
        except ValueError:  # other groups
            return False
        with torch.no_grad():
            for name, parameter in learning.items():
                parameter.copy_(self.weights[name])
        return True


class MemoryFile:
    """The memory of one version, the last candidate, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, version: str) -> Memory | None:
        """Return the memory of a version, None if there is none."""
        try:
            found = torch.load(self.path, map_location="cpu", weights_only=True)
            same = found["version"] == version
            return Memory(found["steps"], found["optimizer"], found["weights"]) if same else None
        except FileNotFoundError:
            return None
        except Exception as error:  # cut short, or of another release
            log.warning("the optimizer's memory in %s is not used: %s", self.path, type(error).__name__)
            return None

    def write(self, version: str, memory: Memory) -> None:
        """Keep the memory of a version, in place of the one before.

        Raises:
            RunError: the disk is full.
        """
        content = {
            "version": version,
            "steps": memory.steps,
            "optimizer": memory.optimizer,
            "weights": memory.weights,
        }
        write_private(self.path, lambda temporary: torch.save(content, temporary))
