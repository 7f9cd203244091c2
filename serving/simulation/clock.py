"""The engine's step loop on an event clock: scheduler, roster, slots and controller are its own, models are costs."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import pairwise
from random import Random
from typing import NamedTuple

from distillspec.errors import ConfigError
from distillspec.serving.control.base import BatchView, Plan, RowResult, RowView, StepResult
from distillspec.serving.kv_cache import SlotPool
from distillspec.serving.params import SamplingParams
from distillspec.serving.requests import Request, RequestStats, Sequence
from distillspec.serving.roster import Roster
from distillspec.serving.scheduler import Limits, SchedulePlan, most_admitted, plan_step, speculation_limit
from distillspec.serving.simulation.hardware import Hardware
from distillspec.serving.simulation.policies import Policy
from distillspec.serving.simulation.trees import TreePlan, tree_nodes
from distillspec.serving.simulation.workload import SimulatedRequest, check_fits
from distillspec.serving.step_record import StepRecord


@dataclass(frozen=True)
class SimulationResult:
    """Every request's statistics in order of arrival, and every step; times on the simulated clock."""

    requests: tuple[SimulatedRequest, ...]
    stats: tuple[RequestStats, ...]
    steps: tuple[StepRecord, ...]


class Window(NamedTuple):
    """What was drafted for a row, what of it was verified, and what stood."""

    drafted: int
    verified: int
    accepted: int
    ranks: tuple[int, ...] = ()


PLAIN = Window(0, 0, 0)


class _Row(NamedTuple):
    """A request's luck, by place in its output."""

    prompt_tokens: int
    runs: list[int]
    gates: list[int] | None
    ranks: list[int]


class Simulation:
    """Serves `requests` under `policy` on `hardware`.

    What the model runner, the draft and the sampler do in the engine is looked up: seconds in the hardware's costs,
    acceptance in each request's luck. A draft reads up what it missed before it drafts again, as in `DraftModel`.

    Raises:
        ConfigError: no requests, one that does not fit a slot, or arrivals that go back in time.
    """

    def __init__(self, requests: Seq[SimulatedRequest], policy: Policy, hardware: Hardware, seed: int = 0) -> None:
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
        self.roster = Roster(
            pool,
            self.limits,
            None,  # nothing is ever decoded
            (),
            prefix_reuse=False,
            on_moves=lambda moves: None,
            on_leaving=lambda sequence: None,
            on_unjudged=lambda slot: None,
        )
        self._random = Random(seed)
        self._rows: dict[str, _Row] = {}
        self._sequences: list[Sequence] = []
        self._arrived = 0
        self._steps: list[StepRecord] = []

    def run(self) -> SimulationResult:
        """Until every request is answered."""
        while self._arrived < len(self.requests) or self.roster.sequences:
            self.step()
        return SimulationResult(self.requests, tuple(s.stats for s in self._sequences), tuple(self._steps))

    def step(self) -> StepResult | None:
        """One step of the engine, or a jump to the next arrival where there is nothing to do."""
        if not self.roster.sequences and self._arrived < len(self.requests):
            self.now = max(self.now, self.requests[self._arrived].arrival_s)
        self._let_in()
        waiting, running = self.roster.waiting, self.roster.running
        most = most_admitted(self.controller, waiting, running, self.limits, self.now)
        schedule = plan_step(waiting, running, self.limits, most)
        self.roster.follow(schedule, self.now)
        return self._run(schedule) if self.roster.pool.owners else None

    def _let_in(self) -> None:
        """Whoever came until now waits for a slot."""
        while self._arrived < len(self.requests) and self.requests[self._arrived].arrival_s <= self.now:
            request = self.requests[self._arrived]
            self._arrived += 1
            params = SamplingParams(max_tokens=request.output_tokens, ignore_eos=True)
            self.roster.enqueue(Request(request.id, (0,) * request.prompt_tokens, params), request.arrival_s)
            sequence = self.roster.sequences[f"{request.id}/0"]
            self._sequences.append(sequence)
            threshold, luck = self.policy.confidence_threshold, request.luck
            gates = None if threshold is None else luck.confident_runs(threshold)
            self._rows[sequence.id] = _Row(request.prompt_tokens, luck.runs, gates, luck.ranks)

    def _run(self, schedule: SchedulePlan) -> StepResult:
        roster, limits = self.roster, self.limits
        decoding = roster.decoding
        waiting = len(roster.sequences) - len(roster.pool.owners)
        prefill_tokens = sum(chunk.tokens for chunk in schedule.prefill)
        views = tuple(
            [
                RowView(s.id, len(s.tokens), speculation_limit(s, limits), unread=len(s.tokens) - s.draft_computed)
                for s in decoding
            ]
        )
        view = BatchView(views, prefill_tokens, waiting)
        plan = self.controller.plan(view)
        windows = self._judge(view, plan)
        draft_s, target_s = self._seconds(view, windows)
        reserved = roster.pool.reserved_tokens
        total_s = draft_s + target_s
        started_s, self.now = self.now, self.now + total_s
        rows = self._commit(decoding, windows)
        rows += self._read(schedule)
        result = StepResult(tuple(rows), view, plan, prefill_tokens, draft_s, target_s, total_s, reserved)
        self.controller.observe(result)
        self._steps.append(StepRecord.of(result, started_s))
        return result

    def _judge(self, view: BatchView, plan: Plan) -> list[Window]:
        """What each row drafts, verifies and keeps, by its luck."""
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
            luck = rows[row.sequence_id]
            place = row.context_tokens - luck.prompt_tokens
            if luck.gates is not None:
                drafted = min(drafted, luck.gates[place])
            verified = min(drafted, most)
            windows.append(Window(drafted, verified, min(verified, luck.runs[place])))
        return windows

    def _judge_tree(self, row: RowView, plan: TreePlan) -> Window:
        luck = self._rows[row.sequence_id]
        widths = plan.widths[: row.limit]
        place, accepted, nodes = row.context_tokens - luck.prompt_tokens, 0, tree_nodes(widths) - 1
        while accepted < len(widths) and luck.ranks[place + accepted] <= widths[accepted]:
            accepted += 1
        return Window(nodes, nodes, accepted, tuple(luck.ranks[place : place + min(accepted + 1, len(widths))]))

    def _seconds(self, view: BatchView, windows: Seq[Window]) -> tuple[float, float]:
        """What drafting and verification take."""
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
            unread = [row.unread for row, tokens in zip(view.rows, drafted, strict=True) if tokens]
            draft_s += latency.reading_up_s(unread)
        if self.hardware.noise:
            noise = self.hardware.noise
            draft_s *= self._random.lognormvariate(-(noise**2) / 2, noise)
            target_s *= self._random.lognormvariate(-(noise**2) / 2, noise)
        return draft_s, target_s

    def _commit(self, decoding: Seq[Sequence], windows: Seq[Window]) -> list[RowResult]:
        """Write what stands and the target's own token into every sequence; end those that are full."""
        results: list[RowResult] = []
        for sequence, (drafted, verified, accepted, ranks) in zip(decoding, windows, strict=True):
            if drafted:
                # As in DraftModel: the text was read up, and of the accepted tokens all but the last drafted one.
                sequence.draft_computed = len(sequence.tokens) + min(accepted, drafted - 1)
                sequence.stats.record_verification(len(ranks) or verified, accepted, accepted + 1)
            self._keep(sequence, accepted + 1)
            results.append(RowResult(sequence.id, verified, accepted, accepted + 1, ranks))
        self._finish(decoding)
        return results

    def _read(self, schedule: SchedulePlan) -> list[RowResult]:
        """Prompts are read on; those read whole have their next token (the first, or one after preemption)."""
        chunks = [(self.roster.sequences[chunk.sequence_id], chunk.tokens) for chunk in schedule.prefill]
        whole = [sequence for sequence, tokens in chunks if self.roster.has_read(sequence, tokens)]
        for sequence in whole:
            self._keep(sequence, 1)
            if sequence.stats.first_token_s is None:
                sequence.stats.first_token_s = self.now
        results = [RowResult(sequence.id, 0, 0, 1) for sequence in whole]
        self._finish(whole)
        return results

    def _keep(self, sequence: Sequence, emitted: int) -> None:
        """`emitted` more tokens; the cache holds all but the newest."""
        tokens = [0] * emitted
        self.roster.pool.record(sequence.held_slot, tokens, sequence.computed)
        sequence.computed += emitted
        sequence.tokens += tokens
        sequence.stats.steps += 1

    def _finish(self, sequences: Seq[Sequence]) -> None:
        """Those that have all their tokens leave."""
        for sequence in [s for s in sequences if len(s.tokens) - s.prompt_length >= s.max_output]:
            sequence.finish_reason = "length"
            self.roster.finish(sequence, self.now)
            self.roster.take_results()
            del self._rows[sequence.id]
