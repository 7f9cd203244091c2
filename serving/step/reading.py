"""The target's pass of a step: windows of drafted tokens and chunks of prompts together."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.decoding.windows import VerificationWindow
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.base import EMPTY
from distillspec.serving.sequences.manager import SequenceManager


def read_step(
    runner: ModelRunner,
    sequences: SequenceManager,
    windows: Sequence[VerificationWindow],
    chunks: Sequence[tuple[SequenceState, int]],
) -> tuple[Tensor, list[VerificationWindow]]:
    """Run the target once over all windows, and the next tokens of prompts: weights are read once.

    Args:
        runner: of the target.
        sequences: told what was read of prompts.
        windows: the newest token of each decoding row, and the tree drafted after it.
        chunks: prompts with the number of tokens to read.

    Returns:
        Hidden states `[Σ (1 + nodes) + prompts that are now read whole, H]`, and the windows that they belong to:
        those given, then one without a tree for each such prompt.
    """
    prompts = [_chunk_input(sequence, tokens) for sequence, tokens in chunks]
    hidden = runner.read([*map(_window_input, windows), *prompts])
    read = zip(chunks, prompts, strict=True)
    started = [sequence for (sequence, _), row in read if sequences.has_read(sequence, len(row.tokens))]
    return hidden, [*windows, *(VerificationWindow(sequence, EMPTY) for sequence in started)]


def _window_input(window: VerificationWindow) -> RowInput:
    sequence, tree = window.sequence, window.tree
    return RowInput(sequence.held_slot, sequence.computed, [sequence.tokens[-1], *tree.tokens], 1 + len(tree), tree)


def _chunk_input(sequence: SequenceState, tokens: int) -> RowInput:
    start = sequence.computed
    end = min(start + tokens, len(sequence.tokens))
    return RowInput(sequence.held_slot, start, sequence.tokens[start:end], wanted=int(end == len(sequence.tokens)))
