"""Texts as far as a draft model has read them into its cache, by sequence and by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.serving.base.catch_up import CATCH_UP_TOKENS_A_STEP, READ_WITH_DRAFTING
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.slot_pool import Prefix


@dataclass(eq=False)
class DraftState:
    """State that a draft keeps of one sequence."""

    computed: int = 0  # leading tokens whose keys and values its cache holds
    unchecked: bool = False  # it has read text and given no logits since, so NaN would be unnoticed
    sound: bool = True  # False after NaN in its logits
    skipped: bool = False  # True: it never reads the sequence
    in_slot: bool = True  # False once the sequence has left its slot, whose memory may be given back
    drafted: tuple[int, ...] = ()  # tokens of the last window that it has read behind the text
    sibling: tuple[DraftState, Prefix] | None = None  # sequence in another slot that begins with the same text


class ReadTexts:
    """Record of the tokens of each sequence that a draft has read. Rows do catch-up prefill when they draft next.

    A text that another sequence begins with is read once, and copied.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner
        self._states: dict[str, DraftState] = {}  # by sequence
        self._last: dict[int, DraftState] = {}  # by slot, of the sequence that it holds or held last

    def state(self, sequence_id: str) -> DraftState:
        """Return what the draft knows of a sequence. Nothing yet, if it is new."""
        return self._states.setdefault(sequence_id, DraftState())

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """Begin with what the cache holds of the prefix, if its logits were finite."""
        state = DraftState()
        sibling = None if prefix is None else self._last.get(prefix.slot)
        if prefix is not None and sibling is not None and sibling.sound and not sibling.unchecked:
            state.computed = min(sibling.computed, prefix.length)
            if prefix.slot != sequence.held_slot:
                state.sibling = sibling, prefix
        self._states[sequence.id] = self._last[sequence.held_slot] = state

    def leave_slot(self, sequence: SequenceState) -> None:
        """Forget the sequence. NaN that nobody has noticed would reach the next one in the slot."""
        state = self._states.pop(sequence.id, None)
        if state is None:
            return
        state.in_slot = False
        if state.unchecked:
            self.runner.cache.clear(sequence.held_slot)
            state.computed = 0

    def distrust(self, sequence: SequenceState) -> None:
        """Read the sequence anew."""
        self.runner.cache.clear(sequence.held_slot)
        state = self.state(sequence.id)
        state.computed, state.drafted = 0, ()
        state.unchecked, state.sibling = False, None

    def catch_up(self, sequences: Sequence[SequenceState], room: int = CATCH_UP_TOKENS_A_STEP) -> set[str]:
        """Do catch-up prefill of those that are far behind, and return which can draft now.

        At most `room` tokens, in the order given. The others decode without drafts of this model meanwhile.
        """
        inputs: list[RowInput] = []
        reading: list[DraftState] = []
        copying: list[tuple[SequenceState, DraftState]] = []
        for sequence in sequences:
            state = self.state(sequence.id)
            if state.sibling is not None and state.sibling[0] in reading:
                reading.append(state)
                copying.append((sequence, state))  # when the sibling has read
                continue
            self._copy_from_sibling(sequence, state)
            unread_tokens = len(sequence.tokens) - state.computed
            if unread_tokens <= READ_WITH_DRAFTING:
                continue
            reading.append(state)
            if room > 0:
                inputs.append(self._read_on(sequence, state, min(unread_tokens - 1, room)))
                room -= len(inputs[-1].tokens)
        if inputs:
            self.runner.read(inputs)
        for sequence, state in copying:
            self._copy_from_sibling(sequence, state)
        return {s.id for s in sequences if len(s.tokens) - self.state(s.id).computed <= READ_WITH_DRAFTING}

    def _read_on(self, sequence: SequenceState, state: DraftState, count: int) -> RowInput:
        """Return the next tokens to read. Drafting reads the newest of all."""
        start, tokens = state.computed, sequence.tokens
        state.computed = start + count
        state.unchecked = True
        return RowInput(sequence.held_slot, start, tokens[start : state.computed], wanted=0)

    def _copy_from_sibling(self, sequence: SequenceState, state: DraftState) -> None:
        """Take over what the sibling has read of the common text since, as long as it keeps its slot."""
        if state.sibling is None:
            return
        sibling, prefix = state.sibling
        if not sibling.sound or not sibling.in_slot or state.computed >= prefix.length:
            state.sibling = None
            return
        length = min(sibling.computed, prefix.length)
        if length > state.computed:
            self.runner.cache.copy_text(prefix.slot, sequence.held_slot, length)
            state.computed = length
            state.unchecked = True
