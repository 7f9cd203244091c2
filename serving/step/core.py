"""Step loop: plan, propose, verify, commit. Requests come and go between steps."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from threading import Lock

import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.base.transfer import on_device
from distillspec.serving.base.tree import TokenTree
from distillspec.serving.control.base import BatchView, LengthController, Plan, RowResult, RowView, StepResult
from distillspec.serving.decoding.sampling import TokenSampler, VerificationWindow
from distillspec.serving.execution.kv_cache import Drop, Move, SlotPool
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.proposers.base import (
    EMPTY,
    Foresees,
    ProposalRequest,
    Proposer,
    Prospect,
    caches_of,
    most_nodes,
    release_memory,
    reset_sequence,
)
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.sequences.request_check import check_request
from distillspec.serving.sequences.scheduler import Limits, SchedulePlan, most_admitted, plan_step, speculation_limit
from distillspec.serving.step.commit import Committer
from distillspec.serving.step.draft_health import DraftHealth
from distillspec.serving.step.output import StepOutput
from distillspec.serving.step.reading import read_step
from distillspec.serving.step.timer import StepTimer


class EngineCore:
    """Step loop of an engine.

    `submit`, `abort` and `at_next_step` queue a message and return, and any thread may call them. One thread calls
    `step`, which handles the messages first and never waits for other threads.
    """

    def __init__(
        self,
        target: LanguageModel,
        runner: ModelRunner,
        pool: SlotPool,
        sampler: TokenSampler,
        controller: LengthController,
        proposer: Proposer | None,
        *,
        prefill_chunk: int = 512,
        prefix_reuse: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.runner, self.sampler, self.controller, self.proposer = runner, sampler, controller, proposer
        self.target = target
        self.vocab_size = target.identity.vocab_size
        self.clock = clock
        self._longest = controller.longest  # packed weights, graphs and reservations are for it
        ahead = _ahead(controller, proposer)
        self.limits = Limits(pool.slots, pool.max_len, pool.token_budget, prefill_chunk, *ahead, pool.block)
        self.sequences = SequenceManager(
            pool,
            self.limits,
            target.tokenizer,
            target.stop_ids,
            prefix_reuse=prefix_reuse,
            on_moves=self._move,
            on_drops=self._drop,
            on_unjudged=runner.cache.clear,
            on_leaving=self._forget,
        )
        self.committer = Committer(self.sequences, runner.cache)
        self.last_result: StepResult | None = None
        self._health = DraftHealth()
        self._messages: deque[Callable[[], None]] = deque()
        self._known: set[str] = set()
        self._submitting = Lock()  # `step` never takes it

    def submit(self, request: Request) -> None:
        """Queue a request for the next step.

        Raises:
            RequestRefused: it could never run, or its id is in use.
            ConfigError: its parameters name tokens that do not exist.
        """
        now = self.clock()  # deadlines and times count from here, not from the next step
        bad_words = self.sequences.bad_words(request.params)
        with self._submitting:
            self.check(request)
            self._known.add(request.id)
        self._messages.append(lambda: self.sequences.enqueue(request, now, bad_words))

    def abort(self, request_id: str) -> None:
        """End a request at the next step, waiting or running. Unknown ids are ignored: it may just have finished."""
        self._messages.append(lambda: self.sequences.end_request(request_id, self.clock()))

    def at_next_step(self, change: Callable[[], None]) -> None:
        """Run `change` between two steps."""
        self._messages.append(change)

    def use_controller(self, controller: LengthController) -> None:
        """Let another controller choose lengths from now on. Call between steps (`at_next_step`).

        Raises:
            ConfigError: it may draft more than the engine was made for. The old controller stays.
        """
        if controller.longest > self._longest:
            raise ConfigError(
                f"a controller that drafts up to {controller.longest} tokens a row does not fit an engine made for "
                f"{self._longest}; give it speculation_length={controller.longest}"
            )
        self.controller = controller
        self._update_limits()

    def replace_proposer(self, proposer: Proposer | None) -> None:
        """Draft with another proposer from now on. Call between steps (`at_next_step`)."""
        release_memory(self.proposer)
        self.proposer = proposer
        self._health = DraftHealth()
        self._update_limits()
        self.controller.draft_changed()
        self.sequences.forget_drafts()

    def release(self) -> None:
        """Free caches and recordings now. They are gigabytes, and the garbage collector may come late.

        No step can follow.
        """
        self.runner.release()
        release_memory(self.proposer)

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished or messages are queued."""
        return bool(self._messages or self.sequences.unfinished)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Advance every running request once. Cheap if there is nothing to do."""
        with on_device(self.target.device):
            return self._step(StepTimer(self.clock))

    def _step(self, timer: StepTimer) -> StepOutput:
        for _ in range(len(self._messages)):  # messages queued from here on wait for the next step
            self._messages.popleft()()
        self.sequences.end_expired(timer.started)
        waiting, running = self.sequences.waiting, self.sequences.running
        most = most_admitted(self.controller, waiting, running, self.limits, timer.started)
        schedule = plan_step(waiting, running, self.limits, most, self.sequences.cached_tokens)
        try:
            self.sequences.follow(schedule, self.clock())
            result = self._run(schedule, timer) if self.sequences.pool.owners else None
        except BaseException:
            self.sequences.recover(self.clock())
            raise
        deltas, finished = self.sequences.take_results()
        self._known.difference_update(output.request_id for output in finished)
        return StepOutput(deltas, finished, result)

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise."""
        taken = request.id in self._known
        check_request(request, self.limits, self.vocab_size, self.target.tokenizer, id_taken=taken)

    def _update_limits(self) -> None:
        """Reserve as many tokens a row as controller and proposer may add to it."""
        lookahead, extra = _ahead(self.controller, self.proposer)
        self.limits = self.sequences.limits = replace(self.limits, lookahead=lookahead, extra=extra)

    def _move(self, moves: Sequence[Move]) -> None:
        self.runner.move(moves)
        if self.proposer is not None:
            self.proposer.move(moves)

    def _drop(self, drops: Sequence[Drop]) -> None:
        for cache in (self.runner.cache, *caches_of(self.proposer)):
            for drop in drops:
                cache.drop(*drop)

    def _forget(self, sequence: SequenceState) -> None:
        """Drop the proposer's state of a sequence that leaves its slot.

        If the draft was still in catch-up prefill, its output was never checked for NaN, so its cache is cleared.
        """
        if self.proposer is None:
            return
        if sequence.draft_unchecked:
            reset_sequence(self.proposer, sequence)
        self.proposer.forget(sequence.id)

    def _run(self, schedule: SchedulePlan, timer: StepTimer) -> StepResult:
        self._health.step()
        decoding, reserved = self.sequences.decoding, self.sequences.pool.reserved_tokens
        planned = [(self.sequences.unfinished[chunk.sequence_id], chunk.tokens) for chunk in schedule.prefill]
        # The plan is older than the slots: tokens of a reused prefix are neither read nor reported.
        chunks = [(sequence, min(tokens, len(sequence.tokens) - sequence.computed)) for sequence, tokens in planned]
        view = self._view(decoding, sum(tokens for _, tokens in chunks))
        plan = self.controller.plan(view)
        with timer.drafting():
            trees = self._propose(decoding, plan, view)
        windows = [VerificationWindow(sequence, tree) for sequence, tree in zip(decoding, trees, strict=True)]
        with timer.verifying():
            hidden, windows = read_step(self.runner, self.sequences, windows, chunks)
            logits = self.target.full_width(self.runner.logits(hidden)) if windows else None
            # Reading the verdicts waits for the target.
            judgements = [] if logits is None else self.sampler.verify(logits, windows)
        rows: tuple[RowResult, ...] = ()
        if logits is not None:
            rows = self.committer.commit(windows, judgements, logits, self.proposer, self.clock())
        result = StepResult(
            rows, view, plan, view.prefill_tokens, timer.draft_s, timer.target_s, timer.total_s, reserved
        )
        self.controller.observe(result)
        self.last_result = result
        return result

    def _view(self, decoding: Sequence[SequenceState], prefill_tokens: int) -> BatchView:
        return BatchView(tuple([self._row(s) for s in decoding]), prefill_tokens, len(self.sequences.waiting))

    def _row(self, sequence: SequenceState) -> RowView:
        cannot_draft = self.proposer is None or self._health.paused
        limit = 0 if cannot_draft else speculation_limit(sequence, self.limits)
        prospect = self.proposer.prospect(sequence) if limit and isinstance(self.proposer, Foresees) else Prospect()
        return RowView(
            sequence.id,
            len(sequence.tokens),
            min(limit, prospect.most),
            prospect.by_model,
            prospect.match,
            sequence.request.max_time_per_token_s,
            len(sequence.tokens) - sequence.draft_computed if prospect.by_model else 0,
        )

    def _propose(self, decoding: Sequence[SequenceState], plan: Plan, view: BatchView) -> list[TokenTree]:
        for sequence, row in zip(decoding, plan.rows, strict=True):
            if not row.draft_prefill and sequence.draft_computed == 0:
                sequence.uses_draft = False
        lengths = {row.sequence_id: row.length for row in plan.rows}
        requests = [ProposalRequest(s, lengths[s.id]) for s in decoding if lengths[s.id] > 0]
        if self._health.paused:
            for sequence in decoding:
                sequence.proposer_failed |= speculation_limit(sequence, self.limits) > 0
        if not requests or self.proposer is None:
            return [EMPTY] * len(decoding)
        try:
            proposals = self.proposer.propose(requests)
        except Exception as error:  # a failing draft must never end a request
            self._health.failed(self.proposer, requests, error)
            return [EMPTY] * len(decoding)
        self._health.succeeded()
        proposed = dict(zip((r.sequence.id for r in requests), proposals, strict=True))
        trees = [proposed.get(s.id, EMPTY) for s in decoding]
        kept = self.controller.trim(view, plan)
        return [
            self._shortened_to_fit(sequence, tree.shortened(depth))
            for sequence, tree, depth in zip(decoding, trees, kept, strict=True)
        ]

    def _shortened_to_fit(self, sequence: SequenceState, tree: TokenTree) -> TokenTree:
        """Drop the deepest levels of a wide tree that has more nodes than reserved places."""
        while len(tree) and len(sequence.tokens) + len(tree) > self.sequences.pool.reserved[sequence.id]:
            tree = tree.shortened(tree.depth - 1)
        return tree


def _ahead(controller: LengthController, proposer: Proposer | None) -> tuple[int, int]:
    """Return the drafted tokens that a row may add, and the further nodes of wide trees."""
    return controller.longest, most_nodes(proposer, controller.longest) - controller.longest
