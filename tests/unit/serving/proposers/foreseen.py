"""What a proposer of one source foresees."""

from __future__ import annotations

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import Option
from distillspec.serving.proposers.base import Proposer


def foreseen(proposer: Proposer, sequence: SequenceState) -> Option:
    """Return its only option for a row."""
    (option,) = proposer.foreseen(sequence) or ()
    return option
