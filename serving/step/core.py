"""Step loop: plan, run, observe. Requests come and go between steps. An executor runs what is planned."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import NamedTuple

import torch

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.base.controllers import LengthController, PlansTrees
from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.base.plans import StepResult
from distillspec.serving.base.requests import Request, SequenceState, Status
from distillspec.serving.base.rows import NOTHING, BatchView, RowView
from distillspec.serving.execution.slot_pool import SlotPool
from distillspec.serving.sequences.manager import SequenceManager
from distillspec.serving.sequences.request_check import check_request
from distillspec.serving.sequences.scheduler import Limits, SchedulePlan, most_admitted, plan_step, speculation_limit
from distillspec.serving.step.executor import Executor, StepWork
from distillspec.serving.step.output import StepOutput
from distillspec.serving.step.prefill_pace import PrefillPace
from distillspec.serving.step.timer import StepTimer


class _Message(NamedTuple):
    """Work that a step does before anything else."""

    run: Callable[[], None]
    early: bool = False  # may run while the step before computes, whose answers do not change it


class EngineCore:
    """Step loop of an engine, or of a simulation.

    `submit`, `abort` and `at_next_step` queue a message and return, and any thread may call them. One thread calls
    `step`, which handles the messages first and never waits for other threads.

    Args:
        target: its vocabulary, tokenizer and stop ids are used. None (simulations): requests are not checked.
        prefill_pace: None reads `prefill_chunk` prompt tokens a step, whoever decodes.
        verification: that of the executor. Lossy ones refuse requests that require exactness.

    Attributes:
        before_step: called before each step that has requests.
        meanwhile: called in each step of an executor that `overlaps`, while the target's pass runs. It may not touch
            sequences, slots or caches.
    """

    def __init__(
        self,
        executor: Executor,
        pool: SlotPool,
        controller: LengthController,
        target: LanguageModel | None,
        *,
        prefill_chunk: int = 512,
        prefix_reuse: bool = True,
        prefill_pace: PrefillPace | None = None,
        verification: str = "exact",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.executor = executor
        self.controller = controller
        self.target = target
        self.clock = clock
        lookahead = controller.speculation_length
        self._speculation_length = lookahead  # packed weights, graphs and reservations are made for it
        limits = Limits(pool.slots, pool.max_len, pool.token_budget, prefill_chunk, lookahead, block=pool.block)
        tokenizer, stop_ids = (None, ()) if target is None else (target.tokenizer, target.stop_ids)
        self.sequences = SequenceManager(pool, limits, tokenizer, stop_ids, prefix_reuse=prefix_reuse, caches=executor)
        executor.attach(self.sequences)
        self.update_limits()
        self.last_result: StepResult | None = None
        self._unobserved: StepResult | None = None  # last step's, until the controller has learnt from it
        self._pace, self._verification = prefill_pace, verification
        self._messages: deque[_Message] = deque()
        self._known_ids: set[str] = set()  # of unfinished requests
        self.before_step: Callable[[], None] | None = None
        self.meanwhile: Callable[[], None] | None = None
        self.may_keep: Callable[[str], bool] | None = None
        self._submitting = Lock()  # `step` never takes it

    @property
    def limits(self) -> Limits:
        """Slots, tokens and lookahead that steps are planned within."""
        return self.sequences.limits

    def submit(self, request: Request) -> None:
        """Queue a request for the next step.

        Raises:
            RequestRefused: it could never run, or its id is in use.
            ConfigError: its parameters name tokens that do not exist.
        """
        now = self.clock()  # deadlines and times count from here, not from the next step
        if self.may_keep is not None and not self.may_keep(request.tenant):
            request = replace(request, log=False)
        bad_words = self.sequences.bad_words(request.params)
        with self._submitting:
            self.check(request)
            self._known_ids.add(request.id)
        self._messages.append(_Message(partial(self.sequences.enqueue, request, now, bad_words), early=True))

    def abort(self, request_id: str) -> None:
        """End a request at the next step, waiting or running. Unknown ids are ignored: it may just have finished."""
        self._messages.append(_Message(lambda: self.sequences.end_request(request_id, self.clock())))

    def at_next_step(self, change: Callable[[], None]) -> None:
        """Run `change` between two steps."""
        self._messages.append(_Message(change))

    def use_controller(self, controller: LengthController) -> None:
        """Let another controller choose lengths from now on. Call between steps (`at_next_step`).

        Raises:
            ConfigError: it may draft more than the engine was made for. The old controller stays.
        """
        if controller.speculation_length > self._speculation_length:
            raise ConfigError(
                f"a controller that drafts up to {controller.speculation_length} tokens a row does not fit an engine "
                f"made for {self._speculation_length}; give it speculation_length={controller.speculation_length}"
            )
        self._observe()
        self.controller = controller
        self.update_limits()

    def update_limits(self) -> None:
        """Reserve as many tokens a row as controller and executor may add to it."""
        lookahead = self.controller.speculation_length
        planned = self.controller.most_nodes if isinstance(self.controller, PlansTrees) else lookahead
        extra = max(planned, self.executor.most_nodes(lookahead)) - lookahead
        self.sequences.limits = replace(self.limits, lookahead=lookahead, extra=extra)

    def wipe(self) -> None:
        """Zero what no running text takes in the caches, and drop the last step, whose rows hold prompts."""
        self.sequences.wipe()
        self._observe()
        self.last_result = None

    def draft_changed(self, change: DraftChange) -> None:
        """Learn that a draft is another from now on, new, or gone. See `LengthController.draft_changed`."""
        self._observe()
        self.update_limits()
        self.controller.draft_changed(change)

    @property
    def has_work(self) -> bool:
        """True while requests are unfinished, messages or outputs wait, or a deleted tenant's values are in caches."""
        sequences = self.sequences
        return bool(self._messages or sequences.unfinished or sequences.done or sequences.deltas or sequences.unwiped)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Advance every running request once. Cheap if there is nothing to do."""
        with self.executor.context():
            return self._step(StepTimer(self.clock))

    def _step(self, timer: StepTimer) -> StepOutput:
        for _ in range(len(self._messages)):  # messages queued from here on wait for the next step
            self._messages.popleft().run()
        if self.sequences.unwiped:
            self.wipe()
        self.sequences.end_expired(timer.started)
        self.sequences.deltas.text_later = self.meanwhile is not None and self.executor.overlaps
        before_step = self.before_step  # another thread may take it away
        if before_step is not None and self.sequences.unfinished:
            before_step()
        waiting, running = self.sequences.waiting, self.sequences.running
        most = most_admitted(self.controller, waiting, running, self.limits, timer.started)
        schedule = plan_step(waiting, running, self._limits_now(most), most, self.sequences.prefixes)
        try:
            self.sequences.follow(schedule, self.clock())
            result = self._run(schedule, timer) if self.sequences.pool.owners else None
        except BaseException:
            self.sequences.recover(self.clock())
            raise
        finished, (deltas, unwritten) = self.sequences.take_finished(), self.sequences.deltas.take()
        self._known_ids.difference_update(output.request_id for output in finished)
        return StepOutput(deltas, finished, result, unwritten)

    def _limits_now(self, most: int | None) -> Limits:
        """Return the limits with as many prompt tokens as the next step should read beside the rows that decode.

        Args:
            most: requests that may get a slot, None for any number.
        """
        unread = [s for s in self.sequences.unfinished.values() if s.status is not Status.DECODE]
        if self._pace is None or not unread:
            return self.limits
        decoding = len(self.sequences.unfinished) - len(unread)
        begun = sum(s.status is Status.PREFILL for s in unread)
        new = min(len(unread) - begun, self.limits.slots - decoding - begun)
        waiting = begun + (new if most is None else min(new, most))
        tokens = self._pace.tokens(decoding, waiting, sum(len(s.tokens) - s.computed for s in unread))
        return replace(self.limits, prefill_chunk=tokens)

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise."""
        if self.target is not None:
            vocabulary, taken = self.target.identity.vocab_size, request.id in self._known_ids
            limited = request.params.allowed_token_ids is not None
            check_request(
                request,
                self.limits,
                vocabulary,
                self.target.tokenizer,
                id_taken=taken,
                verification=self._verification,
                stop_ids=self.sequences.stop_ids,
                bad_words=self.sequences.bad_words(request.params) if limited else (),
            )

    def _run(self, schedule: SchedulePlan, timer: StepTimer) -> StepResult:
        self.executor.begin_step()
        decoding, reserved = self.sequences.decoding, self.sequences.pool.reserved_tokens
        planned = [(self.sequences.unfinished[chunk.sequence_id], chunk.tokens) for chunk in schedule.prefill]
        # An admission may have found another prefix than planned, where one before it took the memory.
        chunks = [(sequence, min(tokens, len(sequence.tokens) - sequence.computed)) for sequence, tokens in planned]
        with timer.timing("planning"):
            view = self._view(decoding, sum(tokens for _, tokens in chunks))
            plan = self.controller.plan(view)
        meanwhile = partial(self._while_it_computes, timer)
        rows = self.executor.run(StepWork(decoding, chunks, view, plan, timer, meanwhile))
        result = StepResult(
            rows,
            view,
            plan,
            view.prefill_tokens,
            draft_s=timer.seconds["draft"],
            target_s=timer.seconds["target"],
            total_s=timer.total_s,
            reserved_tokens=reserved,
            drafted_s=timer.drafted_s,
            readings_s=timer.seconds["readings"],
            planning_s=timer.seconds["planning"],
            overlapped_s=timer.seconds["overlapped"],
        )
        self._observe()  # where no pass ran that it could overlap
        self.last_result = self._unobserved = result
        if not self.executor.overlaps:
            self._observe()
        return result

    def _while_it_computes(self, timer: StepTimer) -> None:
        """Do on the host what no answer of this step changes, while a device computes it.

        First what others wait for: the outputs of the step before (`meanwhile`). Requests are taken in up to the first
        message of another kind, so the order of messages stays.
        """
        with timer.timing("overlapped"):
            if (deliver := self.meanwhile) is not None:  # another thread may take it away
                deliver()
            self._observe()
            while self._messages and self._messages[0].early:
                self._messages.popleft().run()

    def _observe(self) -> None:
        """Let controller and pace learn from the last step.

        On a device of its own the next step's pass runs meanwhile, so lengths follow what is known one step late.
        """
        result, self._unobserved = self._unobserved, None
        if result is None:
            return
        self.controller.observe(result)
        if self._pace is not None:
            self._pace.observe(result)

    def _view(self, decoding: Sequence[SequenceState], prefill_tokens: int) -> BatchView:
        return BatchView(tuple([self._row(s) for s in decoding]), prefill_tokens, len(self.sequences.waiting))

    def _row(self, sequence: SequenceState) -> RowView:
        limit = speculation_limit(sequence, self.limits)
        first, *others = self.executor.foreseen(sequence) if limit else NOTHING
        return RowView(
            sequence.id,
            len(sequence.tokens),
            *first.within(limit),
            sequence.request.max_time_per_token_s,
            tuple([other.within(limit) for other in others]),
            sequence.request.domain,
            sequence.request.prompt_ids,
            room=sequence.room,
        )
