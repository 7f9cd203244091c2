"""Passes of the target in a step: windows of drafted tokens, and prompts in chunks."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.decoding.sampling import VerificationWindow
from distillspec.serving.execution.runner import ModelRunner, RowInput
from distillspec.serving.proposers.base import EMPTY
from distillspec.serving.sequences.manager import SequenceManager


def read_windows(runner: ModelRunner, windows: Sequence[VerificationWindow]) -> Tensor:
    """Run the target over the newest token of each row and the tree drafted after it.

    Returns:
        Hidden states `[Σ (1 + nodes), H]`, window by window.
    """
    return runner.read([_window_input(window) for window in windows]) if windows else runner.no_hidden()


def read_chunks(
    runner: ModelRunner, sequences: SequenceManager, chunks: Sequence[tuple[SequenceState, int]]
) -> tuple[Tensor, list[VerificationWindow]]:
    """Run the target over the next tokens of prompts: (sequence, number of tokens) each.

    Returns:
        The last hidden state `[n, H]` of each prompt that is now read whole, and these rows' windows without a tree.
    """
    if not chunks:
        return runner.no_hidden(), []
    inputs, started = [], []
    for sequence, tokens in chunks:
        start = sequence.computed
        end = min(start + tokens, len(sequence.tokens))
        whole = end == len(sequence.tokens)
        inputs.append(RowInput(sequence.held_slot, start, sequence.tokens[start:end], wanted=int(whole)))
    hidden = runner.read_uneven(inputs)
    for (sequence, _), row in zip(chunks, inputs, strict=True):
        if sequences.has_read(sequence, len(row.tokens)):
            started.append(VerificationWindow(sequence, EMPTY))
    return hidden, started


def _window_input(window: VerificationWindow) -> RowInput:
    sequence, tree = window.sequence, window.tree
    return RowInput(sequence.held_slot, sequence.computed, [sequence.tokens[-1], *tree.tokens], 1 + len(tree), tree)
