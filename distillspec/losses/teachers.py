"""Teachers: the target's view of T positions, a chunk at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from distillspec.signals import HiddenSignal, TeacherSignal
from distillspec.types import OutputHead


class TeacherChunk(NamedTuple):
    """Logits or a signal, or neither. With `log_z` the logits are those of the draft's columns alone."""

    logits: Tensor | None = None  # [C, V], or [C, Vd] with log_z
    signal: TeacherSignal | None = None  # C rows
    log_z: Tensor | None = None  # [C] log-sum-exp of all V logits

    def rows(self, start: int, stop: int) -> TeacherChunk:
        logits, log_z = (None if part is None else part[start:stop] for part in (self.logits, self.log_z))
        return TeacherChunk(logits, None if self.signal is None else self.signal.rows(start, stop), log_z)


class Teacher(Protocol):
    """The target at T positions. `chunk` changes nothing and may be called for any rows, in any order."""

    @property
    def positions(self) -> int | None:
        """Return T, or None if any number of positions will do."""
        ...

    @property
    def logit_width(self) -> int:
        """Return the columns of a chunk's logits (0 without logits). Sets the default chunk size."""
        ...

    def chunk(self, start: int, stop: int) -> TeacherChunk:
        """Return rows `start` to `stop`, without gradient."""
        ...

    def at(self, rows: Tensor) -> Teacher:
        """Return the target at some of the positions, `rows [n]` int64."""
        ...


@dataclass(frozen=True)
class DenseTeacher:
    """A live target: its final hidden states `[T, Dt]` and its output head."""

    hidden: Tensor
    head: OutputHead

    @property
    def positions(self) -> int | None:
        return self.hidden.shape[0]

    @property
    def logit_width(self) -> int:
        return self.head.weight.shape[0]

    def chunk(self, start: int, stop: int) -> TeacherChunk:
        with torch.no_grad():
            rows = self.hidden[start:stop]
            if not torch.is_autocast_enabled(rows.device.type):
                rows = rows.to(self.head.weight.dtype)
            return TeacherChunk(logits=self.head.logits(rows))

    def at(self, rows: Tensor) -> DenseTeacher:
        return DenseTeacher(self.hidden[rows], self.head)


@dataclass(frozen=True)
class HiddenTeacher:
    """A target recorded by its final hidden states. The head computes the logits of the draft's columns alone."""

    signal: HiddenSignal
    head: OutputHead
    truncated: bool  # the head has the rows of a truncated draft's columns

    @classmethod
    def of(cls, signal: HiddenSignal, head: OutputHead, kept_ids: Tensor | None) -> HiddenTeacher:
        """Return the teacher for a draft with the columns `kept_ids [Vd]` int64, None: all of the head's."""
        if kept_ids is None:
            return cls(signal, head, truncated=False)
        bias = None if head.bias is None else head.bias.index_select(0, kept_ids)
        return cls(signal, replace(head, weight=head.weight.index_select(0, kept_ids), bias=bias), truncated=True)

    @property
    def positions(self) -> int | None:
        return len(self.signal)

    @property
    def logit_width(self) -> int:
        return self.head.weight.shape[0]

    def chunk(self, start: int, stop: int) -> TeacherChunk:
        rows = self.signal.rows(start, stop)
        found = DenseTeacher(rows.hidden, self.head).chunk(0, stop - start)
        return found._replace(log_z=rows.log_z) if self.truncated else found

    def at(self, rows: Tensor) -> HiddenTeacher:
        return replace(self, signal=self.signal.at(rows))


@dataclass(frozen=True)
class SignalTeacher:
    """A recorded target: T rows of top-k log-probabilities or of sampled tokens."""

    signal: TeacherSignal

    @property
    def positions(self) -> int | None:
        return len(self.signal)

    @property
    def logit_width(self) -> int:
        return 0

    def chunk(self, start: int, stop: int) -> TeacherChunk:
        return TeacherChunk(signal=self.signal.rows(start, stop))

    def at(self, rows: Tensor) -> SignalTeacher:
        return SignalTeacher(self.signal.at(rows))


@dataclass(frozen=True)
class NoTeacher:
    """No target at all: enough for `ce`."""

    @property
    def positions(self) -> int | None:
        return None

    @property
    def logit_width(self) -> int:
        return 0

    def chunk(self, start: int, stop: int) -> TeacherChunk:
        return TeacherChunk()

    def at(self, rows: Tensor) -> NoTeacher:
        return self
