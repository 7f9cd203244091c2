"""Event clock: the engine's step loop with its own scheduler, slots and controller, and costs in place of models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

from distillspec.errors import ConfigError
from distillspec.serving.base.acceptance import count_trials
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, RequestStats, SequenceState
from distillspec.serving.bench.step_record import StepRecord
from distillspec.serving.control.base import BatchView, Plan, RowResult, RowView, StepResult
from distillspec.serving.execution.kv_cache import SlotPool
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.sequences.scheduler import Limits, SchedulePlan, most_admitted, plan_step, speculation_limit
from distillspec.serving.simulation.hardware import Hardware
from distillspec.serving.simulation.policies import Policy
from distillspec.serving.simulation.trees import TreePlan, tree_nodes
from distillspec.serving.simulation.workload import SimulatedRequest, check_fits


@dataclass(frozen=True)
class SimulationResult:
    """Statistics of every request in order of arrival, and every step. Times are seconds on the simulated clock."""

    requests: tuple[SimulatedRequest, ...]
    stats: tuple[RequestStats, ...]
    steps: tuple[StepRecord, ...]


class SimulatedWindow(NamedTuple):
    """Drafted, verified and accepted tokens of one row."""

    drafted: int
    verified: int
    accepted: int
    ranks: tuple[int, ...] = ()


PLAIN = SimulatedWindow(0, 0, 0)


class _Row(NamedTuple):
    """One request's acceptance trace in the form that steps read, by place in its output."""

    prompt_tokens: int
    runs: list[int]
    gates: list[int] | None
    ranks: list[int]


class Simulation:
    """Serves `requests` under `policy` on `hardware`.

    Results of the model runner, the draft and the sampler are looked up: seconds in the hardware's costs, acceptance in
    each request's trace. As in `DraftModel`, a draft does catch-up prefill before it drafts again.

    Raises:
        ConfigError: there are no requests, one does not fit a slot, or arrivals are not in order.
    """

    def __init__(self, requests: Sequence[SimulatedRequest], policy: Policy, hardware: Hardware, seed: int = 0) -> None:
        if not requests:
            raise ConfigError("the workload is empty; give at least one request")
        if any(later.arrival_s < earlier.arrival_s for earlier, later in pairwise(requests)):
            raise ConfigError("requests must come in order of arrival")
        check_fits(requests, min(hardware.max_len, hardware.cache_tokens))
        self.requests, self.policy, self.hardware = tuple(requests), policy, hardware
        self.controller = policy.controller
        self.now = 0.0
        pool = SlotPool(hardware.slots, hardware.max_len, hardware.cache_tokens)
        self.limits = Limits(
            hardware.slots, hardware.max_len, hardware.cache_tokens, hardware.prefill_chunk, policy.controller.longest
        )
        self.sequences = SequenceManager(
            pool,
            self.limits,
            None,  # nothing is ever decoded
            (),
            prefix_reuse=False,
            on_moves=lambda moves: None,
            on_drops=lambda drops: None,
            on_leaving=lambda sequence: None,
            on_unjudged=lambda slot: None,
        )
        self._random = Random(seed)
        self._rows: dict[str, _Row] = {}
        self.arrived: list[SequenceState] = []  # in order of arrival, finished ones too
        self._steps: list[StepRecord] = []

    def run(self) -> SimulationResult:
        """Step until every request is answered."""
        while len(self.arrived) < len(self.requests) or self.sequences.unfinished:
            self.step()
        return SimulationResult(self.requests, tuple(s.stats for s in self.arrived), tuple(self._steps))

    def step(self) -> StepResult | None:
        """Run one step, after a jump to the next arrival if nothing is to be done."""
        if not self.sequences.unfinished and len(self.arrived) < len(self.requests):
            self.now = max(self.now, self.requests[len(self.arrived)].arrival_s)
        self._enqueue_arrived()
        waiting, running = self.sequences.waiting, self.sequences.running
        most = most_admitted(self.controller, waiting, running, self.limits, self.now)
        schedule = plan_step(waiting, running, self.limits, most)
        self.sequences.follow(schedule, self.now)
        return self._run(schedule) if self.sequences.pool.owners else None

    def _enqueue_arrived(self) -> None:
        """Queue the requests that have arrived by now."""
        while (count := len(self.arrived)) < len(self.requests) and self.requests[count].arrival_s <= self.now:
            request = self.requests[count]
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            self.sequences.enqueue(Request(request.id, (0,) * request.prompt_tokens, params), request.arrival_s)
            sequence = self.sequences.unfinished[f"{request.id}/0"]
            self.arrived.append(sequence)
            threshold, trace = self.policy.confidence_threshold, request.trace
            gates = None if threshold is None else trace.confident_runs(threshold)
            self._rows[sequence.id] = _Row(request.prompt_tokens, trace.runs, gates, trace.ranks)

    def _run(self, schedule: SchedulePlan) -> StepResult:
        sequences, limits = self.sequences, self.limits
        decoding = sequences.decoding
        waiting = len(sequences.unfinished) - len(sequences.pool.owners)
        prefill_tokens = sum(chunk.tokens for chunk in schedule.prefill)
        views = tuple(
            [
                RowView(
                    s.id, len(s.tokens), speculation_limit(s, limits), unread_tokens=len(s.tokens) - s.draft_computed
                )
                for s in decoding
            ]
        )
        view = BatchView(views, prefill_tokens, waiting)
        plan = self.controller.plan(view)
        windows = self._judge(view, plan)
        draft_s, target_s = self._seconds(view, windows)
        reserved = sequences.pool.reserved_tokens
        total_s = draft_s + target_s
        started_s, self.now = self.now, self.now + total_s
        rows = self._commit(decoding, windows)
        rows += self._read(schedule)
        result = StepResult(tuple(rows), view, plan, prefill_tokens, draft_s, target_s, total_s, reserved)
        self.controller.observe(result)
        self._steps.append(StepRecord.of(result, started_s))
        return result

    def _judge(self, view: BatchView, plan: Plan) -> list[SimulatedWindow]:
        """Look up what each row drafts, verifies and accepts."""
        if isinstance(plan, TreePlan):
            return [
                self._judge_tree(row, plan) if length.length else PLAIN
                for row, length in zip(view.rows, plan.rows, strict=True)
            ]
        windows, rows = [], self._rows
        kept = self.controller.trim(view, plan)
        for row, planned, most in zip(view.rows, plan.rows, kept, strict=True):
            drafted = planned.length
            if not drafted:
                windows.append(PLAIN)
                continue
            trace = rows[row.sequence_id]
            place = row.context_tokens - trace.prompt_tokens
            if trace.gates is not None:
                drafted = min(drafted, trace.gates[place])
            verified = min(drafted, most)
            windows.append(SimulatedWindow(drafted, verified, min(verified, trace.runs[place])))
        return windows

    def _judge_tree(self, row: RowView, plan: TreePlan) -> SimulatedWindow:
        trace = self._rows[row.sequence_id]
        widths = plan.widths[: row.limit]
        place, accepted, nodes = row.context_tokens - trace.prompt_tokens, 0, tree_nodes(widths) - 1
        while accepted < len(widths) and trace.ranks[place + accepted] <= widths[accepted]:
            accepted += 1
        return SimulatedWindow(
            nodes, nodes, accepted, tuple(trace.ranks[place : place + count_trials(accepted, len(widths))])
        )

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
            unread_tokens = [row.unread_tokens for row, tokens in zip(view.rows, drafted, strict=True) if tokens]
            draft_s += latency.catch_up_s(unread_tokens)
        if self.hardware.noise:
            noise = self.hardware.noise
            draft_s *= self._random.lognormvariate(-(noise**2) / 2, noise)
            target_s *= self._random.lognormvariate(-(noise**2) / 2, noise)
        return draft_s, target_s

    def _commit(self, decoding: Sequence[SequenceState], windows: Sequence[SimulatedWindow]) -> list[RowResult]:
        """Write accepted tokens and the target's own into every sequence, and finish those that are full."""
        results: list[RowResult] = []
        for sequence, (drafted, verified, accepted, ranks) in zip(decoding, windows, strict=True):
            if drafted:
                # As in DraftModel: the text is read, and of the accepted tokens all but the last drafted one.
                sequence.draft_computed = len(sequence.tokens) + min(accepted, drafted - 1)
                sequence.stats.record_verification(len(ranks) or verified, accepted, accepted + 1)
            self._append(sequence, accepted + 1)
            results.append(RowResult(sequence.id, verified, accepted, accepted + 1, ranks))
        self._finish(decoding)
        return results

    def _read(self, schedule: SchedulePlan) -> list[RowResult]:
        """Read the next prompt tokens. A prompt read whole gives a token: the first, or one after a preemption."""
        chunks = [(self.sequences.unfinished[chunk.sequence_id], chunk.tokens) for chunk in schedule.prefill]
        whole = [sequence for sequence, tokens in chunks if self.sequences.has_read(sequence, tokens)]
        for sequence in whole:
            self._append(sequence, 1)
            if sequence.stats.first_token_s is None:
                sequence.stats.first_token_s = self.now
        results = [RowResult(sequence.id, 0, 0, 1) for sequence in whole]
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
            self.sequences.take_results()
            del self._rows[sequence.id]
