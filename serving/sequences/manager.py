"""Unfinished sequences: which wait, which run, and in which slots."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import replace
from heapq import heappop, heappush

from transformers import PreTrainedTokenizerBase

from distillspec.serving.base.outputs import output
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, RequestOutput, SequenceState, Status
from distillspec.serving.execution.slot_pool import SlotPool
from distillspec.serving.sequences.deltas import Deltas
from distillspec.serving.sequences.detokenize import Detokenizer
from distillspec.serving.sequences.prefixes import Prefixes
from distillspec.serving.sequences.request_check import bad_words
from distillspec.serving.sequences.scheduler import Limits, SchedulePlan, reservation, urgency
from distillspec.serving.sequences.slot_follower import SlotFollower
from distillspec.serving.sequences.turns import TenantTurns


class SequenceManager:
    """All unfinished sequences and the slot pool.

    Args:
        pool: slots that sequences take.
        limits: reservations are made by them.
        tokenizer: None gives outputs without text.
        stop_ids: the model's own end-of-text ids.
        prefix_reuse: start sequences with prefixes that slots already hold. Answers to one prompt always share it.
        caches: follow what happens to slots.
    """

    def __init__(
        self,
        pool: SlotPool,
        limits: Limits,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: Sequence[int],
        *,
        prefix_reuse: bool,
        caches: SlotFollower,
    ) -> None:
        self.pool = pool
        self.limits = limits
        self.tokenizer = tokenizer
        self.stop_ids = tuple(stop_ids)
        self.prefixes = Prefixes(pool, reuse=prefix_reuse)
        self.caches = caches
        self.unfinished: dict[str, SequenceState] = {}  # by id, in order of arrival
        self.texts: dict[str, Detokenizer] = {}
        self.waiting: list[SequenceState] = []  # most urgent first
        # A heap of deadlines, arrivals and ids. It holds no text: answers end long before their deadlines.
        self._deadlines: list[tuple[float, int, str]] = []
        self._groups: dict[str, list[SequenceState]] = {}  # request id → its answers
        self._arrivals = 0  # answers that have come
        self._turns = TenantTurns()
        self.deltas = Deltas()
        self.unwiped = False  # True: caches may hold text of a deleted tenant that nobody reads
        self.done: list[RequestOutput] = []

    @property
    def running(self) -> list[SequenceState]:
        """Sequences in slots, by slot."""
        return [self.unfinished[owner] for _, owner in sorted(self.pool.owners.items())]

    @property
    def decoding(self) -> list[SequenceState]:
        """Sequences in slots whose text is read, by slot."""
        return [s for s in self.running if s.status is Status.DECODE]

    def enqueue(self, request: Request, now: float, bad_words: tuple[tuple[int, ...], ...] = ()) -> None:
        """Queue a request's answers for slots.

        Args:
            request: not yet known.
            now: time of its submission.
            bad_words: result of `bad_words` for its parameters.
        """
        group = []
        for index in range(request.params.n):
            sequence = self._new(request, index, bad_words)
            sequence.stats.submitted_s = now
            self.unfinished[sequence.id] = sequence
            self.texts[sequence.id] = Detokenizer(self.tokenizer, request.prompt_ids, request.params.stop)
            self._wait(sequence)
            if request.deadline_s is not None:
                heappush(self._deadlines, (now + request.deadline_s, sequence.arrival, sequence.id))
            group.append(sequence)
        self._groups[request.id] = group

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """See `request_check.bad_words`. Callable from any thread."""
        return bad_words(params, self.tokenizer)

    def follow(self, schedule: SchedulePlan, now: float) -> None:
        """Preempt and admit as scheduled, and reserve room for the next step of all running sequences."""
        for sequence_id in schedule.preempt:
            self.preempt(self.unfinished[sequence_id])
        self.reserve_ahead(less=True)  # what these give back, others get next
        self.reserve_ahead()
        for sequence_id in schedule.admit:  # last: what is free now is theirs
            self.admit(self.unfinished[sequence_id], now, shares=sequence_id in schedule.sharing)

    def admit(self, sequence: SequenceState, now: float, *, shares: bool = False) -> None:
        """Give a waiting sequence a slot, with its tenant's longest prefix (`shares`: in running ones' slots)."""
        tokens = reservation(sequence, self.limits)
        prefix = self.prefixes.for_admission(sequence, tokens, shares=shares)
        taken = self.pool.take(sequence.id, tokens, self.prefixes.salt(sequence), prefix)
        self._wait_no_more(sequence)
        sequence.slot = taken.slot
        sequence.status = Status.PREFILL
        self.caches.enter_slot(sequence, prefix)
        self.caches.copy(taken.moves)
        self.caches.drop(taken.drops)
        if sequence.stats.admitted_s is None:
            sequence.stats.admitted_s = now
            self._turns.begin(sequence.request, sequence.turn)
        if prefix is not None:
            sequence.computed = prefix.length
            if sequence.stats.preemptions == 0:  # after a preemption it finds its own text, which is no reuse
                sequence.stats.prefix_tokens = prefix.length

    def has_read(self, sequence: SequenceState, tokens: int) -> bool:
        """Record that the target has read the next `tokens` tokens of a prompt. Return True if that completes it."""
        start, end = sequence.computed, sequence.computed + tokens
        self.pool.record(sequence.held_slot, sequence.tokens[start:end], start)
        sequence.computed = end
        if end < len(sequence.tokens):
            return False
        sequence.status = Status.DECODE
        sequence.computed -= 1  # as in any window, the newest token is its root
        return True

    def preempt(self, sequence: SequenceState) -> None:
        """Take the slot away. The text stays and is read again later."""
        self._leave_slot(sequence)
        self._wait(sequence)
        sequence.stats.preemptions += 1

    def recover(self, now: float) -> None:
        """Discard all slots after a step that raised: running sequences wait to be read again, finished ones leave."""
        for slot in range(self.pool.slots):  # a copy of a prefix may be missing
            self.pool.forget(slot)
        for slot, owner in list(self.pool.owners.items()):
            self.caches.clear(slot)  # what it read may not have been finite
            if self.unfinished[owner].slot is None:  # its admission raised
                self.pool.release(slot)
        for sequence in self.running:
            if sequence.finish_reason is None:
                self.preempt(sequence)
            else:
                self.finish(sequence, now)

    def reserve_ahead(self, *, less: bool = False) -> None:
        """Reserve the tokens that the next step may add to running sequences.

        Args:
            less: only for sequences that need fewer than they have.
        """
        for sequence in self.running:
            tokens = reservation(sequence, self.limits)
            if not less or tokens < self.pool.reserved[sequence.id]:
                self.caches.drop(self.pool.reserve(sequence.id, tokens))

    def end_request(self, request_id: str, now: float) -> None:
        """End all answers of a request unfinished, reason `abort`. Unknown ids are ignored."""
        for sequence in list(self._groups.get(request_id, ())):
            if not sequence.finished:
                self._cut(sequence, now)

    def end_expired(self, now: float) -> None:
        """End the sequences whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] < now:
            _, arrival, sequence_id = heappop(self._deadlines)
            sequence = self.unfinished.get(sequence_id)
            if sequence is not None and sequence.arrival == arrival:  # a later request may have the same id
                self._cut(sequence, now)

    def finish(self, sequence: SequenceState, now: float) -> None:
        """Remove a sequence that has a finish reason. The last of a request makes its output."""
        if sequence.status is Status.WAITING:
            self._wait_no_more(sequence)
            self.caches.leave_slot(sequence)  # a preempted one is remembered for its return
        self._leave_slot(sequence)
        sequence.status = Status.FINISHED
        sequence.stats.finished_s = now
        text = self.texts.pop(sequence.id).text
        sequence.text = None if self.tokenizer is None else text
        del self.unfinished[sequence.id]
        group = self._groups[sequence.request.id]
        if all(s.finished for s in group):
            del self._groups[sequence.request.id]
            if not self.prefixes.reuse and len(group) > 1:
                self.pool.forget_salt(self.prefixes.salt(sequence))
            self.done.append(output(sequence.request, group))

    def forgive_failures(self) -> None:
        """Let all sequences speculate again, after a draft swap."""
        for sequence in self.unfinished.values():
            sequence.speculates = True
            sequence.failed_sources.clear()

    def forget_free(self) -> None:
        """Forget the texts of free slots, and give back their memory."""
        self.caches.drop(self.pool.forget_free())

    def take_finished(self) -> tuple[RequestOutput, ...]:
        """Return the requests that have finished since the last call."""
        done, self.done = tuple(self.done), []
        return done

    def forget_tenant(self, tenant: str) -> None:
        """Mark what a tenant runs, so that nothing of it is kept when it has ended. `wipe` is due then, and now."""
        for sequence in self.unfinished.values():
            if sequence.request.tenant == tenant:
                sequence.request = replace(sequence.request, log=False)
                sequence.forgotten = True
        self.unwiped = True

    def wipe(self) -> None:
        """Forget the texts of free slots, and zero what no running text takes in the caches. Call between steps."""
        self.unwiped = False
        self.forget_free()
        self.caches.wipe({sequence.held_slot: len(sequence.tokens) for sequence in self.running})

    def check_integrity(self) -> None:
        """Raise AssertionError where slots, sequences and statuses disagree."""
        self.pool.check_integrity()
        for slot, owner in self.pool.owners.items():
            s = self.unfinished[owner]
            assert s.slot == slot, f"{s.id} is not in the slot it believes"
            assert s.status in (Status.PREFILL, Status.DECODE), f"{s.id} holds a slot and is {s.status}"
            assert self.pool.contents[slot] == s.tokens[: s.computed], f"slot {slot} does not hold the text of {s.id}"
            assert self.pool.salts[slot] == self.prefixes.salt(s), f"slot {slot} is not salted as {s.id} is"
        waiting = [s for s in self.unfinished.values() if s.status is Status.WAITING]
        assert all(s.slot is None for s in waiting), "a waiting sequence holds a slot"
        assert self.waiting == sorted(waiting, key=urgency), "the waiting list is not who waits, most urgent first"
        listed = {s.id for group in self._groups.values() for s in group if not s.finished}
        assert listed == set(self.unfinished) == set(self.texts), "groups, sequences and texts differ"

    def _wait(self, sequence: SequenceState) -> None:
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=urgency)

    def _wait_no_more(self, sequence: SequenceState) -> None:
        place = bisect_left(self.waiting, urgency(sequence), key=urgency)
        assert self.waiting[place] is sequence, f"{sequence.id} is not where it should wait"
        del self.waiting[place]

    def _new(self, request: Request, index: int, bad_words: tuple[tuple[int, ...], ...]) -> SequenceState:
        params = request.params
        end_ids = () if params.ignore_eos else self.stop_ids
        room = min(self.pool.max_len, self.pool.token_budget) - len(request.prompt_ids)
        self._arrivals += 1
        return SequenceState(
            id=f"{request.id}/{index}",
            request=request,
            index=index,
            arrival=self._arrivals,
            turn=self._turns.take(request),
            tokens=list(request.prompt_ids),
            stop_ids=frozenset([*end_ids, *params.stop_token_ids]),
            max_output=room if params.max_tokens is None else min(room, params.max_tokens),
            bad_words=bad_words,
        )

    def _cut(self, sequence: SequenceState, now: float) -> None:
        sequence.finish_reason = "abort"
        self.deltas.end(sequence, self.texts[sequence.id])
        self.finish(sequence, now)

    def _leave_slot(self, sequence: SequenceState) -> None:
        if sequence.slot is None:
            return
        if sequence.status is Status.PREFILL:
            self.caches.clear(sequence.slot)
            self.pool.forget(sequence.slot)
        self.caches.leave_slot(sequence)
        self.pool.release(sequence.slot)
        if sequence.forgotten or (not self.prefixes.reuse and sequence.params.n == 1):
            self.pool.forget(sequence.slot)
        sequence.slot = None
        sequence.computed = 0
        self.unwiped = self.unwiped or sequence.forgotten
