"""Chains of drafted tokens that train: some go on to each further position, as in serving."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.config import TrainConfig
from distillspec.errors import ConfigError
from distillspec.models.state_input import ADDED, StateInput
from distillspec.types import TokenBatch

GOLDEN = (math.sqrt(5) - 1) / 2
FIRST_ALONE = 0.35  # share of a run
FIRST_ALONE_ADDED = 0.75  # of drafts that could draft without states: they learn further positions fast


@dataclass(frozen=True)
class Unrolling:
    """Drafted positions that train at once, for drafts that read states. Token drafts have one kind of position.

    Every loss position begins a chain. A share `decay` of the chains goes on to each further position: position k has
    decay^(k − 1) of the cost and, without `weights`, as much of the loss.
    """

    steps: int = 1
    decay: float = 1.0
    begins: float = 0.0  # share of a run in which the first position trains alone
    weights: tuple[float, ...] | None = None  # of each position's mean loss, relative to each other

    @classmethod
    def of(cls, config: TrainConfig, state_input: StateInput | None = None) -> Unrolling:
        """Return what the settings say for a draft that reads states by `state_input`."""
        weights = None if config.unroll_weights is None else tuple(config.unroll_weights)
        usual = FIRST_ALONE_ADDED if state_input is not None and state_input.way == ADDED else FIRST_ALONE
        begins = usual if config.unroll_from is None else config.unroll_from
        return cls(config.unroll, config.unroll_decay, begins, weights)

    def checked(self) -> Unrolling:
        """Return itself.

        Raises:
            ConfigError: there are more or fewer weights than positions.
        """
        if self.weights is not None and len(self.weights) != self.steps:
            raise ConfigError(
                f"train.unroll_weights={list(self.weights)}: the draft trains {self.steps} drafted positions; give as "
                "many weights"
            )
        return self

    def positions(self, done: float) -> int:
        """Return the positions that train when a share `done` of the run is over."""
        return self.steps if done >= self.begins else 1

    def loss_weights(self, positions: int) -> list[float]:
        """Return what to multiply the loss of each of `positions` positions by, summed over the chains that go on.

        The weights of all their mean losses together are 1.
        """
        shares = [self.decay**position for position in range(positions)]
        wanted = shares if self.weights is None else self.weights[:positions]
        return [weight / share / sum(wanted) for weight, share in zip(wanted, shares, strict=True)]

    def rows(self, batch: TokenBatch) -> list[Tensor]:
        """Return the rows `[n_k]` int64 of `batch.loss_index` that train at the second, third, … position.

        The same batch gives the same rows. A chain ends with its response.
        """
        index, follows = batch.loss_index, goes_on(batch)
        rows, deeper = torch.arange(len(index), device=index.device), []
        start = float(batch.input_ids.sum()) * GOLDEN % 1
        for _ in range(1, self.steps):
            rows = rows[rows + 1 < len(index)] + 1
            rows = _thinned(rows[follows[rows]], self.decay, start)
            deeper.append(rows)
        return deeper


def goes_on(batch: TokenBatch) -> Tensor:
    """Return bool `[N]`: True for loss positions behind one of the same response."""
    index, places = batch.loss_index, batch.position_ids.flatten()
    follows = torch.zeros_like(index, dtype=torch.bool)
    follows[1:] = (index[1:] == index[:-1] + 1) & (places[index[1:]] > 0)
    return follows


def _thinned(rows: Tensor, share: float, start: float) -> Tensor:
    """Return a share of the rows, evenly spread."""
    count = torch.floor(torch.arange(len(rows) + 1, device=rows.device, dtype=torch.float64) * share + start)
    return rows[count[1:] > count[:-1]]
