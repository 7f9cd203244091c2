"""States of texts that the target had read before any draft wanted them."""

from __future__ import annotations

from collections.abc import Sequence

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.slot_pool import Prefix

LEAST_SHARE = 1 / 8  # of a step's prompt tokens, which are read again where prompts take all


class LateStates:
    """The target reads such texts again, beside later steps, and writes their keys and values as they were.

    Rows decode on meanwhile. Drafts that read states wait for those of a row's text (`SlotCache.lacking`), others do
    not.

    Args:
        runner: of the target, whose cache keeps the states.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    def begin(self, running: Sequence[SequenceState]) -> None:
        """Note that no states are kept of what these sequences have in their slots."""
        self.runner.cache.lacking = {s.held_slot: range(s.computed) for s in running if s.computed}

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """Learn that a sequence has a slot, with a prefix of another's text, whose states may be missing."""
        lacking = self.runner.cache.lacking
        gap = None if prefix is None else lacking.get(prefix.slot)
        lacking.pop(sequence.held_slot, None)
        if prefix is not None and gap is not None and gap.start < prefix.length:
            lacking[sequence.held_slot] = range(gap.start, min(gap.stop, prefix.length))

    def read(self, running: Sequence[SequenceState], most: int, prompts: int) -> None:
        """Read as many tokens again as a step has room for.

        Args:
            running: sequences in slots, by slot.
            most: prompt tokens that a step may read.
            prompts: those that it reads.
        """
        rows, lacking = list[RowInput](), self.runner.cache.lacking
        room = max(most - prompts, int(most * LEAST_SHARE), 1)
        for sequence in running:
            gap = lacking.get(sequence.held_slot)
            if gap is None or not room:
                continue
            end = min(gap.stop, gap.start + room)
            rows.append(RowInput(sequence.held_slot, gap.start, sequence.tokens[gap.start : end], wanted=0))
            room -= end - gap.start
            if end == gap.stop:
                del lacking[sequence.held_slot]
            else:
                lacking[sequence.held_slot] = range(end, gap.stop)
        if rows:
            self.runner.read(rows)
