"""Chunks and blocks of positions, so that `[T, V]` logits never exist at once.

A *chunk* of positions goes through the output head at once: its logits exist in the head's dtype, and large products
are fast. A *block* of it goes through the losses: their float32 temporaries exist, about 8 times the draft's width and
4 times the target's a position.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from distillspec.losses.inputs import LossInputs
from distillspec.losses.teachers import Teacher, TeacherChunk
from distillspec.types import OutputHead

_CHUNK_FLOATS = {"cpu": 2**23}
_BLOCK_FLOATS = {"cpu": 2**23}
_ACCELERATOR_FLOATS = 2**28


@dataclass(frozen=True)
class Positions:
    """Inputs of T positions besides hidden states. `LossInputs` describes the fields."""

    labels: Tensor | None = None
    from_draft: Tensor | None = None
    advantage: Tensor | None = None
    kept_ids: Tensor | None = None
    temperature: float = 1.0
    writer_logprobs: Tensor | None = None


def default_chunk_tokens(draft_width: int, target_width: int, device: torch.device) -> int:
    """Return the positions a chunk, so that its logits take about 32 MiB on CPU and 1 GiB on accelerators."""
    budget = _CHUNK_FLOATS.get(device.type, _ACCELERATOR_FLOATS)
    return max(16, budget // (draft_width + target_width))


def block_tokens(draft_width: int, target_width: int, device: torch.device) -> int:
    """Return the positions a block, so that temporaries take about 32 MiB on CPU and 1 GiB on accelerators."""
    budget = _BLOCK_FLOATS.get(device.type, _ACCELERATOR_FLOATS)
    return max(1, budget // (8 * draft_width + 4 * target_width))


@dataclass(frozen=True)
class Block:
    """Positions `start` to `stop` of the batch, inside a chunk that starts at `chunk_start`."""

    positions: Positions
    teacher_chunk: TeacherChunk
    chunk_start: int
    start: int
    stop: int

    def of(self, chunk: Tensor) -> Tensor:
        """Return the block's rows of a tensor that holds the whole chunk."""
        return chunk[self.start - self.chunk_start : self.stop - self.chunk_start]

    def inputs(self, draft_logits: Tensor) -> LossInputs:
        """Return the block's loss inputs, given its `draft_logits [N, Vd]`."""
        at = self.positions
        logits, signal, log_z = self.teacher_chunk.rows(self.start - self.chunk_start, self.stop - self.chunk_start)
        return LossInputs(
            draft_logits,
            target_logits=logits,
            target_log_z=log_z,
            signal=signal,
            kept_ids=at.kept_ids,
            labels=_rows(at.labels, self.start, self.stop),
            from_draft=_rows(at.from_draft, self.start, self.stop),
            advantage=_rows(at.advantage, self.start, self.stop),
            temperature=at.temperature,
            writer_logprobs=_rows(at.writer_logprobs, self.start, self.stop),
            first_position=self.start,
        )


@dataclass(frozen=True)
class Chunks:
    """Chunks of a batch of positions, and the blocks of each."""

    head: OutputHead
    teacher: Teacher
    positions: Positions
    chunk_tokens: int | None

    def bounds(self, hidden: Tensor) -> Iterator[tuple[int, int]]:
        """Yield start and stop of each chunk of `hidden [T, D]`.

        Raises:
            ValueError: the teacher or another input has not T positions.
        """
        self._check_rows(hidden.shape[0])
        size = self.chunk_tokens or default_chunk_tokens(*self._widths(), hidden.device)
        for start in range(0, hidden.shape[0], size):
            yield start, min(start + size, hidden.shape[0])

    def blocks(self, start: int, stop: int) -> Iterator[Block]:
        """Yield the blocks of the chunk from `start` to `stop`."""
        teacher_chunk = self.teacher.chunk(start, stop)
        size = block_tokens(*self._widths(), self.head.weight.device)
        for first in range(start, stop, size):
            yield Block(self.positions, teacher_chunk, start, first, min(first + size, stop))

    def _widths(self) -> tuple[int, int]:
        return self.head.weight.shape[0], self.teacher.logit_width

    def _check_rows(self, rows: int) -> None:
        """Raise ValueError if an input has not `rows` positions: slices would silently misalign."""
        at = self.positions
        counts = {"the teacher": self.teacher.positions}
        for name, values in (
            ("labels", at.labels),
            ("from_draft", at.from_draft),
            ("advantage", at.advantage),
            ("writer_logprobs", at.writer_logprobs),
        ):
            counts[name] = None if values is None else values.shape[0]
        for name, count in counts.items():
            if count is not None and count != rows:
                raise ValueError(f"{name} has {count} positions, draft_hidden {rows}")


def _rows(values: Tensor | None, start: int, stop: int) -> Tensor | None:
    return None if values is None else values[start:stop]
