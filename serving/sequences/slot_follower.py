"""Followers of the slots of sequences: the caches of target and drafts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.execution.slot_pool import Drop, Move, Prefix


class SlotFollower(Protocol):
    """Caches of the slots, which follow what happens to them."""

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """Learn that a sequence has a slot. `prefix` of another's text is copied into it next."""
        ...

    def leave_slot(self, sequence: SequenceState) -> None:
        """Learn that a sequence is about to lose its slot, or ends without one."""
        ...

    def copy(self, moves: Sequence[Move]) -> None:
        """Copy prefixes from slot to slot."""
        ...

    def drop(self, drops: Sequence[Drop]) -> None:
        """Give memory back."""
        ...

    def clear(self, slot: int) -> None:
        """Clear a slot whose values were never checked for NaN."""
        ...

    def wipe(self, texts: Mapping[int, int]) -> None:
        """Zero all that is held, but the first tokens of some slots: slot → tokens."""
        ...
