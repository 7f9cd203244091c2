"""Deltas of answers: their new tokens and text since the last step's outputs were taken."""

from __future__ import annotations

from distillspec.serving.base.outputs import delta
from distillspec.serving.base.requests import SequenceDelta, SequenceState
from distillspec.serving.sequences.detokenize import Detokenizer


class Deltas:
    """New tokens and text of answers, in the order of their steps.

    Attributes:
        text_later: running answers may get the text of their tokens later, where no stop string depends on it.
    """

    def __init__(self) -> None:
        self.text_later = False
        self._made: list[SequenceDelta] = []
        self._unwritten: dict[int, Detokenizer] = {}

    def __len__(self) -> int:
        return len(self._made)

    def add(self, sequence: SequenceState, before: int, text: str, detokenizer: Detokenizer) -> None:
        """Add what a sequence has written since it had `before` output tokens.

        Args:
            text: as far as it is decoded.
            detokenizer: the answer's. It may have put off tokens, whose text the delta gets later.
        """
        if detokenizer.behind:
            self._unwritten[len(self._made)] = detokenizer
        self._made.append(delta(sequence, before, text))

    def end(self, sequence: SequenceState, detokenizer: Detokenizer) -> None:
        """Add the rest of the text of a sequence that has ended without another token."""
        self.add(sequence, sequence.output_length, detokenizer.flush(), detokenizer)

    def take(self) -> tuple[tuple[SequenceDelta, ...], dict[int, Detokenizer]]:
        """Return the deltas since the last call, and the detokenizers that still owe text, by index of delta."""
        deltas, unwritten = tuple(self._made), self._unwritten
        self._made = []
        self._unwritten = {}
        return deltas, unwritten
