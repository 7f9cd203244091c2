"""Runs steps on a simulated machine: seconds by its costs, acceptance by each request's trace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import zip_longest
from random import Random
from typing import NamedTuple

from distillspec.errors import ConfigError
from distillspec.serving.base.acceptance import RowResult, Trial
from distillspec.serving.base.plans import Plan, RowPlan
from distillspec.serving.base.requests import SequenceState
from distillspec.serving.base.rows import ANY, BatchView, Option, RowView
from distillspec.serving.base.shape import TreeShape
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.execution.slot_pool import Drop, Move, Prefix
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.simulation.hardware import Hardware
from distillspec.serving.simulation.simulated_row import SimulatedRow
from distillspec.serving.step.executor import StepWork
from distillspec.serving.step.micro_batches import FIND, pipelined_s, split


class SimulatedWindow(NamedTuple):
    """Drafted, verified and accepted tokens of one row."""

    drafted: int
    verified: int
    accepted: int
    depth: int = 0  # of a tree, 0 for chains
    trials: tuple[Trial, ...] = ()  # of a tree
    passes: tuple[int, ...] = ()  # of a tree, tokens of each of the draft's passes
    source: str = DRAFT

    @property
    def firsts(self) -> int:
        """Accepted tokens that are the first of their siblings, before any other."""
        ranks = [trial.rank for trial in self.trials if trial.accepted]
        return next((level for level, rank in enumerate(ranks) if rank), self.accepted)

    def result(self, sequence_id: str) -> RowResult:
        """Return the result of a row of whose output there is room for all tokens."""
        if not self.depth:
            return RowResult.chain(sequence_id, self.verified, self.accepted, self.accepted + 1, self.source)
        trials = tuple([trial._replace(source=self.source) for trial in self.trials])
        return RowResult(sequence_id, self.depth, self.verified, self.accepted, self.accepted + 1, trials)


PLAIN = SimulatedWindow(0, 0, 0)


class _Timing(NamedTuple):
    """Seconds of one micro-batch: of each draft, of the target, and of drafts that read ahead."""

    drafted_s: dict[str, float]
    target_s: float
    readings_s: float = 0.0

    @property
    def draft_s(self) -> float:
        return sum(self.drafted_s.values()) + self.readings_s


def _ends(timings: Sequence[_Timing]) -> float:
    return pipelined_s([timing.draft_s for timing in timings], [timing.target_s for timing in timings])


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
        self._draft_computed: dict[tuple[str, str], int] = {}  # sequence and draft → tokens that it has read
        self._random = Random(seed)

    def attach(self, sequences: SequenceManager) -> None:
        self.sequences = sequences

    def context(self) -> AbstractContextManager[object]:
        return nullcontext()

    def begin_step(self) -> None:
        """Count nothing."""

    def foreseen(self, sequence: SequenceState) -> tuple[Option, ...]:
        latency, computed = self.hardware.latency, self._draft_computed
        options = [
            Option(
                ANY,
                unread_tokens=len(sequence.tokens) - computed.get((sequence.id, source), 0),
                source=source,
                drafts_block=latency.drafts_block,
                wide=latency.draft is not None or latency.drafts_block,
            )
            for source in latency.members or (DRAFT,)
        ]
        return tuple(options)

    def most_nodes(self, depth: int) -> int:
        return depth

    def run(self, work: StepWork) -> tuple[RowResult, ...]:
        windows = self._judge(work.view, work.plan)
        readings_s = self._read_ahead(work)
        timings = self._timings(work, windows, readings_s)
        self.now += _ends(timings) + self.hardware.host.seconds(len(work.decoding) + len(work.chunks))
        timer = work.timer
        timer.seconds["draft"] = sum([timing.draft_s for timing in timings])
        timer.seconds["target"] = sum([timing.target_s for timing in timings])
        timer.seconds["readings"] = readings_s
        for timing in timings if self.hardware.latency.members else ():
            timer.add_drafted(timing.drafted_s)
        return (*self._commit(work.decoding, windows), *self._read(work.chunks))

    def enter_slot(self, sequence: SequenceState, prefix: Prefix | None) -> None:
        """Nothing is kept by slot."""

    def leave_slot(self, sequence: SequenceState) -> None:
        for source in self.hardware.latency.members or (DRAFT,):
            self._draft_computed.pop((sequence.id, source), None)

    def copy(self, moves: Sequence[Move]) -> None:
        """There is no cache."""

    def drop(self, drops: Sequence[Drop]) -> None:
        """There is no cache."""

    def clear(self, slot: int) -> None:
        """There is no cache."""

    def wipe(self, texts: Mapping[int, int]) -> None:
        """There is no cache."""

    def release(self) -> None:
        """There is no cache."""

    def _judge(self, view: BatchView, plan: Plan) -> list[SimulatedWindow]:
        """Look up what each row drafts, verifies and accepts."""
        rows = zip(view.rows, plan.rows, strict=True)
        return [self._judge_row(row, planned) if planned.trees else PLAIN for row, planned in rows]

    def _judge_row(self, row: RowView, planned: RowPlan) -> SimulatedWindow:
        if len(planned.trees) > 1:
            raise ConfigError("trees of several sources in one row cannot be simulated; plan one a row")
        simulated = self.rows[row.sequence_id]
        source, shape = planned.trees[0]
        trace = simulated.drafts[source]
        place = row.context_tokens - simulated.prompt_tokens
        drafted = shape.depth
        if trace.gates is not None:
            drafted = min(drafted, trace.gates[place])
        verified = min(drafted, planned.verified_length)
        if shape.nodes > shape.depth:
            window = self._judge_tree(trace.ranks[place:], shape.shortened(verified), drafted)
            return window._replace(passes=shape.reads[:drafted], source=source)
        return SimulatedWindow(drafted, verified, min(verified, trace.runs[place]), source=source)

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

    def _timings(self, work: StepWork, windows: Sequence[SimulatedWindow], readings_s: float) -> list[_Timing]:
        """Return the seconds of each micro-batch. What drafts read ahead is the last one's."""
        drafting = sum([window.drafted > 0 for window in windows])
        wanted = self.hardware.micro_batches
        counts = range(1, max(1, drafting) + 1) if wanted == FIND else [max(1, min(wanted, drafting))]
        splits = [self._split(work, windows, count, readings_s) for count in counts]
        return min(splits, key=_ends)

    def _split(
        self, work: StepWork, windows: Sequence[SimulatedWindow], count: int, readings_s: float
    ) -> list[_Timing]:
        parts = zip(work.split(count), split(windows, count), strict=True)
        timings = [_Timing(*self._seconds(part.view, own)) for part, own in parts]
        return [*timings[:-1], timings[-1]._replace(readings_s=readings_s)]

    def _seconds(self, view: BatchView, windows: Sequence[SimulatedWindow]) -> tuple[dict[str, float], float]:
        """Return the seconds of each draft, and of verification."""
        latency = self.hardware.latency
        contexts = [row.context_tokens for row in view.rows]
        verified = [window.verified for window in windows]
        read = [max(contexts)] * len(contexts) if self.hardware.padded_attention and contexts else contexts
        if self.hardware.batch_expansion:
            read = [context * (1 + tokens) for context, tokens in zip(read, verified, strict=True)]
        target_s = latency.target_s(read, verified, view.prefill_tokens)
        sources = dict.fromkeys([window.source for window in windows if window.drafted])
        drafted_s = {source: self._drafting_s(source, view.rows, windows) for source in sources}
        if self.hardware.noise:
            noise = self.hardware.noise
            drafted_s = {
                source: seconds * self._random.lognormvariate(-(noise**2) / 2, noise)
                for source, seconds in drafted_s.items()
            }
            target_s *= self._random.lognormvariate(-(noise**2) / 2, noise)
        return drafted_s, target_s

    def _drafting_s(self, source: str, rows: Sequence[RowView], windows: Sequence[SimulatedWindow]) -> float:
        """Return the seconds in which a draft drafts for its rows, catch-up prefill included."""
        latency = self.hardware.latency.of_draft(source)
        lengths = [window.drafted if window.source == source else 0 for window in windows]
        unread = []
        for row, length in zip(rows, lengths, strict=True):
            if length:
                read = self._draft_computed.get((row.sequence_id, source), 0)
                unread.append(row.context_tokens - read)
        further_s = self._further_s([window for window in windows if window.source == source], latency)
        drafting_s = latency.draft_s([row.context_tokens for row in rows], lengths)
        return drafting_s + further_s + latency.catch_up_s(unread)

    def _read_ahead(self, work: StepWork) -> float:
        """Let drafts read ahead of switches. Return the seconds."""
        seconds = 0.0
        for name, source, tokens in work.plan.readings:
            key, length = (name, source), len(self.sequences.unfinished[name].tokens)
            unread = length - 1 - self._draft_computed.get(key, 0)
            read = max(0, min(tokens, unread))
            self._draft_computed[key] = self._draft_computed.get(key, 0) + read
            table = self.hardware.latency.table_of(source)
            seconds += table.seconds(0, read) if table is not None and read else 0.0
        return seconds

    @staticmethod
    def _further_s(windows: Sequence[SimulatedWindow], latency: LatencyModel) -> float:
        """Return the seconds of a draft's passes over trees beyond those of chains as deep."""
        if latency.draft is None or latency.drafts_block or not any(window.passes for window in windows):
            return 0.0
        passes = [window.passes or (1,) * window.drafted for window in windows]
        further_s = 0.0
        for level in zip_longest(*passes, fillvalue=0):
            rows = sum(tokens > 0 for tokens in level)
            further_s += latency.draft.seconds(0, sum(level)) - latency.draft.seconds(0, rows)
        return further_s

    def _commit(self, decoding: Sequence[SequenceState], windows: Sequence[SimulatedWindow]) -> list[RowResult]:
        """Write accepted tokens and the target's own into every sequence, and finish those that are full."""
        results: list[RowResult] = []
        for sequence, window in zip(decoding, windows, strict=True):
            if drafted := window.drafted:
                # As in DraftModel: the text is read, and of the accepted tokens all that it drafted behind.
                read = len(sequence.tokens) + min(window.firsts, drafted - 1)
                self._draft_computed[sequence.id, window.source] = read
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
