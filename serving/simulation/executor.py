"""Runs steps on a simulated machine: seconds by its costs, acceptance by each request's trace."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from random import Random
from typing import NamedTuple

from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.control.base import BatchView, Plan, RowPlan, RowView
from distillspec.serving.execution.kv_cache import Drop, Move, Prefix
from distillspec.serving.proposers.base import Prospect
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.simulation.acceptance_trace import AcceptanceTrace
from distillspec.serving.simulation.hardware import Hardware
from distillspec.serving.step.executor import StepWork


class SimulatedWindow(NamedTuple):
    """Drafted, verified and accepted tokens of one row."""

    drafted: int
    verified: int
    accepted: int
    depth: int = 0  # of a tree, 0 for chains
    trials: tuple[Trial, ...] = ()  # of a tree
    passes: tuple[int, ...] = ()  # of a tree, tokens of each of the draft's passes

    @property
    def firsts(self) -> int:
        """Accepted tokens that are the first of their siblings, before any other."""
        ranks = [trial.rank for trial in self.trials if trial.accepted]
        return next((level for level, rank in enumerate(ranks) if rank), self.accepted)

    def result(self, sequence_id: str) -> RowResult:
        """Return the result of a row of whose output there is room for all tokens."""
        if not self.depth:
            return RowResult.chain(sequence_id, self.verified, self.accepted, self.accepted + 1)
        return RowResult(sequence_id, self.depth, self.verified, self.accepted, self.accepted + 1, self.trials)


PLAIN = SimulatedWindow(0, 0, 0)


class SimulatedRow(NamedTuple):
    """One request's acceptance trace in the form that steps read, by place in its output."""

    prompt_tokens: int
    runs: list[int]
    gates: list[int] | None
    ranks: list[int]

    @classmethod
    def of(cls, prompt_tokens: int, trace: AcceptanceTrace, confidence_threshold: float | None) -> SimulatedRow:
        """Return the row of a request whose draft stops at or below a confidence, None: never."""
        gates = None if confidence_threshold is None else trace.confident_runs(confidence_threshold)
        return cls(prompt_tokens, trace.runs, gates, trace.ranks)


class SimulatedExecutor:
    """Steps on `hardware` in simulated time, `now`. See `Executor`.

    As in `DraftModel`, a draft does catch-up prefill before it drafts again.

    Attributes:
        rows: what is known of each sequence. To be filled before a sequence takes a slot.
        now: seconds since the start.
    """

    overlaps = False

    def __init__(self, hardware: Hardware, seed: int) -> None:
        self.hardware, self.now = hardware, 0.0
        self.rows: dict[str, SimulatedRow] = {}
        self._draft_computed: dict[str, int] = {}  # sequence → tokens that its draft has read
        self._random = Random(seed)

    def attach(self, sequences: SequenceManager) -> None:
        self.sequences = sequences

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin_step(self) -> None:
        """Count nothing."""

    def prospect(self, sequence: SequenceState) -> Prospect:
        unread = len(sequence.tokens) - self._draft_computed.get(sequence.id, 0)
        latency = self.hardware.latency
        return Prospect(unread_tokens=unread, at_once=latency.at_once, wide=latency.draft is not None)

    def most_nodes(self, depth: int) -> int:
        return depth

    def run(self, work: StepWork) -> tuple[RowResult, ...]:
        windows = self._judge(work.view, work.plan)
        draft_s, target_s = self._seconds(work.view, windows)
        self.now += draft_s + target_s
        work.timer.draft_s, work.timer.target_s = draft_s, target_s
        return (*self._commit(work.decoding, windows), *self._read(work.chunks))

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """Nothing is kept by slot."""

    def leave_slot(self, sequence: SequenceState) -> None:
        self._draft_computed.pop(sequence.id, None)

    def copy(self, moves: Sequence[Move]) -> None:
        """There is no cache."""

    def drop(self, drops: Sequence[Drop]) -> None:
        """There is no cache."""

    def clear(self, slot: int) -> None:
        """There is no cache."""

    def release(self) -> None:
        """There is no cache."""

    def _judge(self, view: BatchView, plan: Plan) -> list[SimulatedWindow]:
        """Look up what each row drafts, verifies and accepts."""
        rows = zip(view.rows, plan.rows, strict=True)
        return [self._judge_row(row, planned) if planned.trees else PLAIN for row, planned in rows]

    def _judge_row(self, row: RowView, planned: RowPlan) -> SimulatedWindow:
        trace, shape = self.rows[row.sequence_id], planned.trees[0].shape
        place, drafted = row.context_tokens - trace.prompt_tokens, shape.depth
        if trace.gates is not None:
            drafted = min(drafted, trace.gates[place])
        verified = min(drafted, planned.verified_length)
        if shape.nodes > shape.depth:
            seen = self._judge_tree(trace.ranks[place:], shape.shortened(verified), drafted)
            return seen._replace(passes=shape.passes[:drafted])
        return SimulatedWindow(drafted, verified, min(verified, trace.runs[place]))

    @staticmethod
    def _judge_tree(ranks: Sequence[int], shape: TreeShape, drafted: int) -> SimulatedWindow:
        trials: list[Trial] = []
        node, accepted = 0, 0
        for level, children in enumerate(shape.levels):
            tried, right = children[node], ranks[level] - 1
            trials += [Trial(level + 1, rank, DRAFT, rank == right) for rank in range(min(tried, right + 1))]
            if right >= tried:
                break
            node, accepted = sum(children[:node]) + right, level + 1
        return SimulatedWindow(drafted, shape.nodes, accepted, shape.depth, tuple(trials))

    def _seconds(self, view: BatchView, windows: Sequence[SimulatedWindow]) -> tuple[float, float]:
        """Return the seconds of drafting and of verification."""
        latency = self.hardware.latency
        contexts = [row.context_tokens for row in view.rows]
        drafted = [window.drafted for window in windows]
        verified = [window.verified for window in windows]
        read = contexts
        if self.hardware.batch_expansion:
            read = [context * (1 + tokens) for context, tokens in zip(contexts, verified, strict=True)]
        target_s = latency.target_s(read, verified, view.prefill_tokens)
        draft_s = latency.draft_s(contexts, drafted) if any(drafted) else 0.0
        if draft_s:
            draft_s += self._further_s(windows)
            unread_tokens = [row.unread_tokens for row, tokens in zip(view.rows, drafted, strict=True) if tokens]
            draft_s += latency.catch_up_s(unread_tokens)
        if self.hardware.noise:
            noise = self.hardware.noise
            draft_s *= self._random.lognormvariate(-(noise**2) / 2, noise)
            target_s *= self._random.lognormvariate(-(noise**2) / 2, noise)
        return draft_s, target_s

    def _further_s(self, windows: Sequence[SimulatedWindow]) -> float:
        """Return the seconds of a draft's passes over trees beyond those of chains as deep."""
        latency = self.hardware.latency
        if latency.draft is None or latency.at_once or not any(window.passes for window in windows):
            return 0.0
        own = [window.passes or (1,) * window.drafted for window in windows]
        further_s = 0.0
        for level in zip_longest(*own, fillvalue=0):
            rows = sum(tokens > 0 for tokens in level)
            further_s += latency.draft.seconds(0, sum(level)) - latency.draft.seconds(0, rows)
        return further_s

    def _commit(self, decoding: Sequence[SequenceState], windows: Sequence[SimulatedWindow]) -> list[RowResult]:
        """Write accepted tokens and the target's own into every sequence, and finish those that are full."""
        results: list[RowResult] = []
        for sequence, window in zip(decoding, windows, strict=True):
            if drafted := window.drafted:
                # As in DraftModel: the text is read, and of the accepted tokens all that it drafted behind.
                self._draft_computed[sequence.id] = len(sequence.tokens) + min(window.firsts, drafted - 1)
            result = window.result(sequence.id)
            sequence.stats.record_verification(result.nodes, result.depth, result.trials, result.emitted)
            self._append(sequence, result.emitted)
            results.append(result)
        self._finish(decoding)
        return results

    def _read(self, chunks: Sequence[tuple[SequenceState, int]]) -> list[RowResult]:
        """Read the next prompt tokens. A prompt read whole gives a token: the first, or one after a preemption."""
        whole = [sequence for sequence, tokens in chunks if self.sequences.has_read(sequence, tokens)]
        for sequence in whole:
            self._append(sequence, 1)
            if sequence.stats.first_token_s is None:
                sequence.stats.first_token_s = self.now
        results = [RowResult(sequence.id, 0, 0, 0, 1) for sequence in whole]
        self._finish(whole)
        return results

    def _append(self, sequence: SequenceState, emitted: int) -> None:
        """Append `emitted` tokens. The cache holds all but the newest."""
        tokens = [0] * emitted
        self.sequences.pool.record(sequence.held_slot, tokens, sequence.computed)
        sequence.computed += emitted
        sequence.tokens += tokens
        sequence.stats.steps += 1

    def _finish(self, sequences: Sequence[SequenceState]) -> None:
        """Finish the sequences that have all their tokens."""
        for sequence in [s for s in sequences if len(s.tokens) - s.prompt_length >= s.max_output]:
            sequence.finish_reason = "length"
            self.sequences.finish(sequence, self.now)
            del self.rows[sequence.id]
