"""Signals: the target's distribution at the tokens of a text, recorded for training.

Shapes: T = tokens, K = entries kept per position, D = the target's width. Probabilities are float32 unless said
otherwise, log-probabilities natural (nats).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

SignalKind = Literal["topk", "sampled", "hidden"]


@dataclass(frozen=True)
class TeacherSignal:
    """The target's distribution at T positions, compressed. Row t is the distribution that emits token t.

    `topk`: `ids` are the K most probable tokens, `logprobs` their raw log-probabilities (temperature 1, no filter) and
    `tail` the probability of all others. It may also hold n independent draws from these others, `tail_ids`, with their
    raw log-probabilities: unlike the tail's mass they show how much probability a draft gives them.

    `sampled`: `ids` are K independent draws from the raw distribution (unbiased), `logprobs` theirs, `tail` is zero.
    """

    kind: SignalKind
    ids: Tensor  # [T, K] int32
    logprobs: Tensor  # [T, K] float16 on disk, float32 in batches
    tail: Tensor  # [T] float32, probability
    tail_ids: Tensor | None = None  # [T, n] int32, −1 where nothing was drawn
    tail_logprobs: Tensor | None = None  # [T, n] as logprobs

    def __len__(self) -> int:
        return self.ids.shape[0]

    @property
    def request(self) -> SignalRequest:
        """Return the request that records such a signal."""
        return SignalRequest(self.kind, self.ids.shape[1], 0 if self.tail_ids is None else self.tail_ids.shape[1])

    def rows(self, start: int, stop: int) -> TeacherSignal:
        return self._each(lambda values: values[start:stop])

    def at(self, rows: Tensor) -> TeacherSignal:
        """Return the rows `[n]` int64."""
        return self._each(lambda values: values[rows])

    def to(self, device: torch.device | str) -> TeacherSignal:
        return self._each(lambda values: values.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> TeacherSignal:
        ids, logprobs, tail = (change(column) for column in (self.ids, self.logprobs, self.tail))
        draws = (None if column is None else change(column) for column in (self.tail_ids, self.tail_logprobs))
        return TeacherSignal(self.kind, ids, logprobs, tail, *draws)


@dataclass(frozen=True)
class HiddenSignal:
    """The target's whole distribution at T positions: what its head reads, and the log-sum-exp of its logits.

    The head's product gives the logits again. log Z saves the columns that a draft's truncated vocabulary lacks.
    """

    hidden: Tensor  # [T, D] bfloat16 of a bfloat16 target, else float16
    log_z: Tensor  # [T] float32, nats

    kind: SignalKind = "hidden"

    def __len__(self) -> int:
        return len(self.log_z)

    @property
    def request(self) -> SignalRequest:
        """Return the request that records such a signal."""
        return SignalRequest("hidden")

    def rows(self, start: int, stop: int) -> HiddenSignal:
        return HiddenSignal(self.hidden[start:stop], self.log_z[start:stop])

    def at(self, rows: Tensor) -> HiddenSignal:
        """Return the rows `[n]` int64."""
        return HiddenSignal(self.hidden[rows], self.log_z[rows])

    def to(self, device: torch.device | str) -> HiddenSignal:
        return HiddenSignal(self.hidden.to(device), self.log_z.to(device))


Signal = TeacherSignal | HiddenSignal


@dataclass(frozen=True)
class SignalRequest:
    """Teacher signal to record: its kind, entries a position (no `hidden`), and draws from the tail."""

    kind: SignalKind = "topk"
    entries: int = 64
    tail_draws: int = 0  # topk only

    @property
    def draws(self) -> int:
        """Return the number of tokens drawn at random at each position."""
        return {"topk": self.tail_draws, "sampled": self.entries}.get(self.kind, 0)
