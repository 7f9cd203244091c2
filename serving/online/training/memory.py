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
from torch import Tensor
from torch.optim import Optimizer
from transformers import PreTrainedModel

from distillspec.files import write_private
from distillspec.models.draft_head import HeadRows

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Memory:
    """State of learning after an update."""

    steps: int  # since the lineage began
    optimizer: dict[str, Any]
    weights: dict[str, Tensor]  # float32, of the parameters that learn
    rows: HeadRows | None = None  # of the head, if it was renewed since

    @classmethod
    def of(cls, steps: int, optimizer: Optimizer, model: PreTrainedModel) -> Memory:
        """Take the state of an update that has ended."""
        weights = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
        return cls(steps, optimizer.state_dict(), weights)

    def restore(self, optimizer: Optimizer, model: PreTrainedModel) -> bool:
        """Continue from here. Return False, and change nothing, if the draft learns with other parameters."""
        learning = {name: p for name, p in model.named_parameters() if p.requires_grad}
        if self.rows is not None:
            head = set(map(id, model.get_output_embeddings().parameters()))
            renewed = {name for name, p in learning.items() if id(p) in head}
            return self._moved(self.rows, renewed, optimizer, learning).restore(optimizer, model)
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

    def _moved(self, rows: HeadRows, names: set[str], optimizer: Optimizer, learning: dict[str, Tensor]) -> Memory:
        """Return the memory with the parameters `names` in the head's new order. Its new rows begin anew."""
        known = {id(p): name for name, p in learning.items()}
        order = [known.get(id(p)) for group in optimizer.param_groups for p in group["params"]]
        renewed = {index for index, name in enumerate(order) if name in names}
        states = {
            index: {key: _moments_of(rows, value) if index in renewed else value for key, value in state.items()}
            for index, state in self.optimizer["state"].items()
        }
        weights = {
            name: rows.moved(value, learning[name].detach()) if name in names else value
            for name, value in self.weights.items()
        }
        return Memory(self.steps, {**self.optimizer, "state": states}, weights)


def _moments_of(rows: HeadRows, moments: Tensor) -> Tensor:
    """Return moments with their rows in the new order, zero for new ones. Adam's number of steps has no rows."""
    return moments if moments.dim() == 0 else rows.moved(moments, moments.new_zeros(len(rows), *moments.shape[1:]))


class MemoryFile:
    """The memory of one version, the last candidate, in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, version: str) -> Memory | None:
        """Return the memory of a version, None if there is none."""
        try:
            stored = torch.load(self.path, map_location="cpu", weights_only=True)
            same = stored["version"] == version
            return Memory(stored["steps"], stored["optimizer"], stored["weights"]) if same else None
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
