"""The step loop: plan, propose, verify, commit. Requests come and go between steps."""

from __future__ import annotations

import logging
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Lock

import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.backoff import Backoff
from distillspec.serving.commit import Committer
from distillspec.serving.control.base import BatchView, LengthController, Plan, RowResult, RowView, StepResult
from distillspec.serving.kv_cache import Move, SlotPool
from distillspec.serving.proposers.base import (
    EMPTY,
    Foresees,
    ProposalRequest,
    Proposer,
    Prospect,
    begin_anew,
    most_nodes,
    release_memory,
)
from distillspec.serving.requests import Request, RequestOutput, RequestRefused, Sequence, SequenceDelta
from distillspec.serving.roster import Roster
from distillspec.serving.runner import ModelRunner, RowInput
from distillspec.serving.sampling import TokenSampler, Window
from distillspec.serving.scheduler import Limits, SchedulePlan, most_admitted, plan_step, speculation_limit
from distillspec.serving.transfer import on_device
from distillspec.serving.tree import TokenTree

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepOutput:
    """What one step did: gains by answer, and the requests it finished."""

    deltas: tuple[SequenceDelta, ...] = ()
    finished: tuple[RequestOutput, ...] = ()
    result: StepResult | None = None  # None when there was nothing to run


class EngineCore:
    """The step loop over parts that `Engine` makes.

    `submit`, `abort` and `at_next_step` only leave a message and return; any thread may call them. `step` is called
    by one thread, takes the messages first, and never waits for anyone.
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
        self._longest = controller.longest  # what weights, graphs and room were made for
        self.limits = Limits(pool.slots, pool.max_len, pool.token_budget, prefill_chunk, *_ahead(controller, proposer))
        self.roster = Roster(
            pool,
            self.limits,
            target.tokenizer,
            target.stop_ids,
            prefix_reuse=prefix_reuse,
            on_moves=self._follow,
            on_unjudged=runner.cache.clear,
            on_leaving=self._forget,
        )
        self.committer = Committer(self.roster, runner.cache)
        self.last_result: StepResult | None = None
        self._backoff = Backoff()  # of the proposer
        self._failures_told: set[tuple[object, ...]] = set()
        self._messages: deque[Callable[[], None]] = deque()
        self._known: set[str] = set()
        self._door = Lock()  # between submitters alone; `step` never takes it

    def submit(self, request: Request) -> None:
        """Queue a request; it takes part from the next step on.

        Raises:
            RequestRefused: it could never run, or its id lives already.
            ConfigError: its parameters name tokens that do not exist.
        """
        now = self.clock()  # deadlines and times count from here, not from the end of the step that runs
        bad_words = self.roster.bad_words(request.params)
        with self._door:
            self.check(request)
            self._known.add(request.id)
        self._messages.append(lambda: self.roster.enqueue(request, now, bad_words))

    def abort(self, request_id: str) -> None:
        """End a request at the next step, wherever it is; unknown ids are ignored (it may just have finished)."""
        self._messages.append(lambda: self.roster.end_request(request_id, self.clock()))

    def at_next_step(self, change: Callable[[], None]) -> None:
        """Run `change` between two steps."""
        self._messages.append(change)

    def use_controller(self, controller: LengthController) -> None:
        """Let another controller choose lengths from now on; call between steps (`at_next_step`).

        Raises:
            ConfigError: it may draft more than the engine was made for; the controller before stays.
        """
        if controller.longest > self._longest:
            raise ConfigError(
                f"a controller that drafts up to {controller.longest} tokens a row does not fit an engine made for "
                f"{self._longest}; give it speculation_length={controller.longest}"
            )
        self.controller = controller
        self._look_ahead()

    def replace_proposer(self, proposer: Proposer | None) -> None:
        """Draft with another proposer from now on; call between steps (`at_next_step`)."""
        release_memory(self.proposer)
        self.proposer = proposer
        self._backoff = Backoff()
        self._failures_told.clear()
        self._look_ahead()
        self.controller.draft_changed()
        self.roster.forget_drafts()

    def release(self) -> None:
        """Give caches and recordings back at once, not when the garbage collector comes to this ring of objects: they
        are gigabytes. No step can follow."""
        self.runner.release()
        release_memory(self.proposer)

    @property
    def has_work(self) -> bool:
        return bool(self._messages or self.roster.sequences)

    @torch.inference_mode()
    def step(self) -> StepOutput:
        """Run everything once; what each request gained. Cheap when there is nothing to do."""
        with on_device(self.target.device):
            return self._step(_Timer(self.clock))

    def _step(self, timer: _Timer) -> StepOutput:
        for _ in range(len(self._messages)):  # what comes meanwhile waits for the next step
            self._messages.popleft()()
        self.roster.end_expired(timer.started)
        waiting, running = self.roster.waiting, self.roster.running
        most = most_admitted(self.controller, waiting, running, self.limits, timer.started)
        schedule = plan_step(waiting, running, self.limits, most)
        try:
            self.roster.follow(schedule, self.clock())
            result = self._run(schedule, timer) if self.roster.pool.owners else None
        except BaseException:
            self.roster.recover(self.clock())
            raise
        deltas, finished = self.roster.take_results()
        self._known.difference_update(output.request_id for output in finished)
        return StepOutput(deltas, finished, result)

    def check(self, request: Request) -> None:
        """Raise what `submit` would raise."""
        request.params.check_vocabulary(self.vocab_size)
        if self.target.tokenizer is None:
            request.params.check_needs_no_text()
        length = len(request.prompt_ids)
        longest = min(self.limits.max_len, self.limits.cache_tokens)
        problem = None
        if request.id in self._known:
            problem = "a request with this id is running already"
        elif request.deadline_s is not None and not request.deadline_s >= 0:
            problem = f"deadline_s={request.deadline_s} must be at least 0"
        elif length == 0:
            problem = "the prompt is empty; give at least one token"
        elif length >= longest:
            problem = (
                f"a prompt of {length} tokens leaves no room to answer: prompt and output together may have "
                f"{longest} (max_model_len)"
            )
        elif request.max_time_per_token_s is not None and not request.max_time_per_token_s > 0:
            problem = f"max_time_per_token_s={request.max_time_per_token_s} must be above 0 seconds"
        elif bad := [token for token in request.prompt_ids if not 0 <= token < self.vocab_size]:
            problem = f"token id {bad[0]} is not in the model's vocabulary (0…{self.vocab_size - 1})"
        if problem is not None:
            raise RequestRefused(f"request {request.id}: {problem}")

    def _look_ahead(self) -> None:
        """Set aside as much a row as controller and proposer may add to it."""
        lookahead, extra = _ahead(self.controller, self.proposer)
        self.limits = self.roster.limits = replace(self.limits, lookahead=lookahead, extra=extra)

    def _follow(self, moves: Seq[Move]) -> None:
        self.runner.move(moves)
        if self.proposer is not None:
            self.proposer.move(moves)

    def _forget(self, sequence: Sequence) -> None:
        """Before it leaves its slot. If the draft was still reading this text, none of its output was checked for NaN:
        clear the slot."""
        if self.proposer is None:
            return
        if sequence.draft_unchecked:
            begin_anew(self.proposer, sequence)
        self.proposer.forget(sequence.id)

    def _run(self, schedule: SchedulePlan, timer: _Timer) -> StepResult:
        self._backoff.step()
        decoding, reserved = self.roster.decoding, self.roster.pool.reserved_tokens
        planned = [(self.roster.sequences[chunk.sequence_id], chunk.tokens) for chunk in schedule.prefill]
        # Planned before slots were given out: what a prefix in the cache saves is not read, and not to be reported.
        chunks = [(sequence, min(tokens, len(sequence.tokens) - sequence.computed)) for sequence, tokens in planned]
        view = self._view(decoding, sum(tokens for _, tokens in chunks))
        plan = self.controller.plan(view)
        with timer.part("draft"):
            trees = self._propose(decoding, plan, view)
        windows = [Window(sequence, tree) for sequence, tree in zip(decoding, trees, strict=True)]
        with timer.part("target"):
            hidden = self._read_windows(windows)
            prompt_hidden, started = self._read_chunks(chunks)
            windows += started
            states = torch.cat([hidden, prompt_hidden])
            logits = self.target.full_width(self.runner.logits(states)) if windows else None
            # Reading the verdicts is what waits for the target.
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

    def _view(self, decoding: Seq[Sequence], prefill_tokens: int) -> BatchView:
        return BatchView(tuple([self._row(s) for s in decoding]), prefill_tokens, len(self.roster.waiting))

    def _row(self, sequence: Sequence) -> RowView:
        none = self.proposer is None or self._backoff.waits
        limit = 0 if none else speculation_limit(sequence, self.limits)
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

    def _propose(self, decoding: Seq[Sequence], plan: Plan, view: BatchView) -> list[TokenTree]:
        for sequence, row in zip(decoding, plan.rows, strict=True):
            if not row.draft_prefill and sequence.draft_computed == 0:
                sequence.uses_draft = False
        lengths = {row.sequence_id: row.length for row in plan.rows}
        asked = [ProposalRequest(s, lengths[s.id]) for s in decoding if lengths[s.id] > 0]
        if self._backoff.waits:
            for sequence in decoding:
                sequence.proposer_failed |= speculation_limit(sequence, self.limits) > 0
        if not asked or self.proposer is None:
            return [EMPTY] * len(decoding)
        try:
            grown = self.proposer.propose(asked)
        except Exception as error:  # a draft may be slow or wrong, but never the end of a request
            self._proposer_failed(asked, error)
            return [EMPTY] * len(decoding)
        self._backoff.succeeded()
        proposed = dict(zip((r.sequence.id for r in asked), grown, strict=True))
        trees = [proposed.get(s.id, EMPTY) for s in decoding]
        kept = self.controller.trim(view, plan)
        return [
            self._that_fits(sequence, tree.shortened(depth))
            for sequence, tree, depth in zip(decoding, trees, kept, strict=True)
        ]

    def _proposer_failed(self, asked: Seq[ProposalRequest], error: Exception) -> None:
        """Let speculation rest, longer after each failure in a row, and begin anew with the rows that were asked for.

        Told once for each place in the code that raises.
        """
        assert self.proposer is not None
        steps = self._backoff.failed()
        for request in asked:
            begin_anew(self.proposer, request.sequence)
            request.sequence.proposer_failed = True
        place = traceback.extract_tb(error.__traceback__)[-1]
        kind = (type(error), place.filename, place.lineno)
        if kind not in self._failures_told:
            self._failures_told.add(kind)
            log.warning(
                "no speculation for %d steps: the proposer failed (%s: %s); it is tried again, and failures of this "
                "kind are not logged again",
                steps,
                type(error).__name__,
                error,
            )

    def _that_fits(self, sequence: Sequence, tree: TokenTree) -> TokenTree:
        """A wide tree needs a place for every node: where fewer were reserved (near the context's end) its
        deepest levels go."""
        while len(tree) and len(sequence.tokens) + len(tree) > self.roster.pool.reserved[sequence.id]:
            tree = tree.shortened(max(tree.depths) - 1)
        return tree

    def _read_windows(self, windows: Seq[Window]) -> Tensor:
        """Run the target over the newest token of each row and what was drafted after it."""
        if not windows:
            return self.runner.no_hidden()
        return self.runner.read([_window_input(window) for window in windows])

    def _read_chunks(self, chunks: Seq[tuple[Sequence, int]]) -> tuple[Tensor, list[Window]]:
        """Read on in prompts; the last hidden state of those that are read whole, and their (empty) windows."""
        if not chunks:
            return self.runner.no_hidden(), []
        inputs, started = [], []
        for sequence, tokens in chunks:
            start = sequence.computed
            end = min(start + tokens, len(sequence.tokens))
            whole = end == len(sequence.tokens)
            inputs.append(RowInput(sequence.held_slot, start, sequence.tokens[start:end], wanted=int(whole)))
        hidden = self.runner.read_uneven(inputs)
        for (sequence, _), row in zip(chunks, inputs, strict=True):
            if self.roster.has_read(sequence, len(row.tokens)):
                started.append(Window(sequence, EMPTY))
        return hidden, started


class _Timer:
    """Seconds a step spends drafting and in the target."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self.started = clock()
        self.spent = {"draft": 0.0, "target": 0.0}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        begun = self.clock()
        yield
        self.spent[name] += self.clock() - begun

    @property
    def draft_s(self) -> float:
        return self.spent["draft"]

    @property
    def target_s(self) -> float:
        return self.spent["target"]

    @property
    def total_s(self) -> float:
        return self.clock() - self.started


def _ahead(controller: LengthController, proposer: Proposer | None) -> tuple[int, int]:
    """Drafted tokens that a row may add, and the nodes that wide trees have beside them."""
    return controller.longest, most_nodes(proposer, controller.longest) - controller.longest


def _window_input(window: Window) -> RowInput:
    sequence, tree = window.sequence, window.tree
    return RowInput(sequence.held_slot, sequence.computed, [sequence.tokens[-1], *tree.tokens], 1 + len(tree), tree)
