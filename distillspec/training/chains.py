"""Chains of drafted tokens that train: some go on to each further position, as in serving."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.types import TokenBatch

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True)
class Unrolling:
    """Drafted positions that train at once, for drafts that read states. Token drafts have one kind of position.

    Every loss position begins a chain. A share `decay` of the chains goes on to each further position: position k has
    the weight decay^(k − 1) on average, and as much of the cost.
    """

    steps: int = 1
    decay: float = 1.0
    begins: float = 0.0  # share of a run in which the first position trains alone

    def positions(self, done: float) -> int:
        """Return the positions that train when a share `done` of the run is over."""
        return self.steps if done >= self.begins else 1

    def first_weight(self, positions: int) -> float:
        """Return the weight of the first of `positions` positions, where all together have 1."""
        return 1 / sum(self.decay**position for position in range(positions))

    def rows(self, batch: TokenBatch) -> list[Tensor]:
        """Return the rows `[n_k]` int64 of `batch.loss_index` that train at the second, third, … position.

        The same batch gives the same rows. A chain ends with its response.
        """
        index, places = batch.loss_index, batch.position_ids.flatten()
        follows = torch.zeros_like(index, dtype=torch.bool)
        follows[1:] = (index[1:] == index[:-1] + 1) & (places[index[1:]] > 0)
        rows, found = torch.arange(len(index), device=index.device), []
        start = float(batch.input_ids.sum()) * GOLDEN % 1
        for _ in range(1, self.steps):
            rows = rows[rows + 1 < len(index)] + 1
            rows = _thinned(rows[follows[rows]], self.decay, start)
            found.append(rows)
        return found


def _thinned(rows: Tensor, share: float, start: float) -> Tensor:
    """Return a share of the rows, evenly spread."""
    count = torch.floor(torch.arange(len(rows) + 1, device=rows.device, dtype=torch.float64) * share + start)
    return rows[count[1:] > count[:-1]]
