"""The C++ kernel of teacher signals: the most probable tokens of rows of logits (`signals.cpp`)."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.native.library import SOURCES, NotBuilt, library
from distillspec.native.vector_kernel import drawn_from, numbers


class TopTokens(NamedTuple):
    """The k most probable tokens of n rows, of equals the lowest id first."""

    ids: Tensor  # [n, k] int32
    logprobs: Tensor  # [n, k] float32, nats. Those of a row with NaN are NaN, and so is its log Z
    log_z: Tensor  # [n] float32


class Position(NamedTuple):
    """One emitted token."""

    row: int  # of the logits
    token: int
    temperature: float  # that it was drawn at, NaN where its text judges no draft
    drafted: int = -1  # the token drafted there, −1 for none
    probs: Tensor | None = None  # [R, width] float32 that it was drawn from, None: deterministic
    probs_row: int = 0
    ids: Tensor | None = None  # [width] int64, the token of each column in ascending order. None: the same number

    @property
    def numbers(self) -> list[int]:
        """The position as the kernel reads it, without its temperature."""
        return [self.row, self.token, self.drafted, *drawn_from(self.probs, self.probs_row, self.ids)]


class SignalKernel(NamedTuple):
    """Functions by dtype of logits."""

    functions: dict[torch.dtype, ctypes._NamedFuncPointer]
    recording: dict[torch.dtype, ctypes._NamedFuncPointer]

    def top(self, logits: Tensor, count: int) -> TopTokens:
        """Return the `count` most probable tokens of `logits [n, V]`, contiguous in each row."""
        rows, width = logits.shape
        ids, logprobs = torch.empty(rows, count, dtype=torch.int32), torch.empty(rows, count)
        log_z = torch.empty(rows)
        self.functions[logits.dtype](
            *(logits.data_ptr(), rows, logits.stride(0), width, count),
            *(ids.data_ptr(), logprobs.data_ptr(), log_z.data_ptr(), torch.get_num_threads()),
        )
        return TopTokens(ids, logprobs, log_z)

    def record(self, logits: Tensor, count: int, positions: Sequence[Position]) -> Tensor:
        """Return what the replay log keeps of n emitted tokens, `[n, bytes]` uint8 (`Packed`).

        Args:
            logits: `[N, V]` raw, contiguous in each row.
            count: most probable tokens to keep.
        """
        packed = torch.empty(len(positions), bytes_of(count), dtype=torch.uint8)
        temperatures = (ctypes.c_double * len(positions))(*(position.temperature for position in positions))
        self.recording[logits.dtype](
            *(logits.data_ptr(), logits.stride(0), logits.shape[1], count),
            numbers([number for position in positions for number in position.numbers]),
            *(temperatures, len(positions), packed.data_ptr(), torch.get_num_threads()),
        )
        return packed


def bytes_of(count: int) -> int:
    """Return the bytes of a recorded position with `count` tokens: ids, log-probabilities, the tail, four figures."""
    return count * (4 + 2) + 4 + 4 * 2


def signal_kernel_for(logits: Tensor) -> SignalKernel | None:
    """Return the kernel if it takes such logits, None for others and where it cannot be built."""
    if logits.device.type != "cpu" or logits.stride(-1) != 1 or logits.dtype not in (torch.float32, torch.bfloat16):
        return None
    return _kernel()


@cache
def _kernel() -> SignalKernel | None:
    try:
        kernels = library(SOURCES / "signals.cpp")
    except NotBuilt:
        return None
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    functions = {torch.float32: kernels.signals_float32, torch.bfloat16: kernels.signals_bfloat16}
    for function in functions.values():
        function.argtypes = [pointer, *[number] * 4, *[pointer] * 3, ctypes.c_int]
        function.restype = None
    recording = {torch.float32: kernels.record_float32, torch.bfloat16: kernels.record_bfloat16}
    for function in recording.values():
        function.argtypes = [pointer, number, number, number, pointer, pointer, number, pointer, ctypes.c_int]
        function.restype = None
    return SignalKernel(functions, recording)
