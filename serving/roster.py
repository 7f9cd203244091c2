"""Who waits, who runs, in which slot: the book-keeping of sequences between the steps' computations."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from collections.abc import Sequence as Seq
from heapq import heappop, heappush

from transformers import PreTrainedTokenizerBase

from distillspec.errors import ConfigError
from distillspec.serving.detokenize import Detokenizer
from distillspec.serving.kv_cache import Move, SlotPool
from distillspec.serving.outputs import delta, output
from distillspec.serving.params import SamplingParams
from distillspec.serving.requests import Request, RequestOutput, Sequence, SequenceDelta, Status
from distillspec.serving.scheduler import Limits, SchedulePlan, reservation, urgency

MIN_PREFIX = 16  # shared tokens below which copying is not worth it


class Roster:
    """All unfinished sequences; owns the slot pool.

    Tensors follow through `on_moves` (slots changed places), `on_leaving` (a sequence is about to leave its slot) and
    `on_unjudged` (a slot is left whose numbers nobody has looked at).
    """

    def __init__(
        self,
        pool: SlotPool,
        limits: Limits,
        tokenizer: PreTrainedTokenizerBase | None,
        stop_ids: Seq[int],
        *,
        prefix_reuse: bool,
        on_moves: Callable[[Seq[Move]], None],
        on_leaving: Callable[[Sequence], None],
        on_unjudged: Callable[[int], None],
    ) -> None:
        self.pool, self.limits, self.tokenizer, self.stop_ids = pool, limits, tokenizer, tuple(stop_ids)
        self.prefix_reuse = prefix_reuse
        self._on_moves, self._on_leaving, self._on_unjudged = on_moves, on_leaving, on_unjudged
        self.sequences: dict[str, Sequence] = {}  # unfinished ones, in order of arrival
        self.texts: dict[str, Detokenizer] = {}
        self.waiting: list[Sequence] = []  # most urgent first
        self._deadlines: list[tuple[float, int, Sequence]] = []  # a heap; the finished are passed over
        self._groups: dict[str, list[Sequence]] = {}  # request id → its answers
        self._arrivals = 0
        self.deltas: list[SequenceDelta] = []
        self.done: list[RequestOutput] = []

    @property
    def running(self) -> list[Sequence]:
        """The sequences in slots, by slot."""
        return [self.sequences[owner] for owner in self.pool.owners]

    @property
    def decoding(self) -> list[Sequence]:
        return [s for s in self.running if s.status is Status.DECODE]

    def enqueue(self, request: Request, now: float, bad_words: tuple[tuple[int, ...], ...] = ()) -> None:
        """Let a request's answers wait for slots; `now` is when it was submitted, `bad_words` what `bad_words` gave."""
        group = []
        for index in range(request.params.n):
            sequence = self._new(request, index, bad_words)
            sequence.stats.submitted_s = now
            self.sequences[sequence.id] = sequence
            self.texts[sequence.id] = Detokenizer(self.tokenizer, request.prompt_ids, request.params.stop)
            self._wait(sequence)
            if request.deadline_s is not None:
                heappush(self._deadlines, (now + request.deadline_s, sequence.arrival, sequence))
            group.append(sequence)
        self._groups[request.id] = group

    def bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """Bad words as token sequences, at the beginning of a text and after a space; for any thread.

        Raises:
            ConfigError: the tokenizer cannot read a word, or there is none.
        """
        if self.tokenizer is None:
            params.check_needs_no_text()
        if self.tokenizer is None or not params.bad_words:
            return params.banned_ids
        words = set(params.banned_ids)
        for word in params.bad_words:
            for spelt in (word, f" {word.lstrip()}"):
                try:
                    words.add(tuple(self.tokenizer.encode(spelt, add_special_tokens=False)))
                except (TypeError, UnicodeError) as error:
                    raise ConfigError(f"bad_words: the tokenizer cannot read {word!r}; give plain text") from error
        return tuple(sorted(words - {()}))  # a tokenizer may make nothing of a word

    def follow(self, schedule: SchedulePlan, now: float) -> None:
        """Who is to lose a slot loses it, who is admitted gets one, and everyone's next step has its room."""
        for sequence_id in schedule.preempt:
            self.preempt(self.sequences[sequence_id])
        for sequence_id in schedule.admit:
            self.admit(self.sequences[sequence_id], now)
        self.reserve_ahead()

    def admit(self, sequence: Sequence, now: float) -> None:
        """Give a waiting sequence the next slot, with the beginning that a slot of the same tenant already holds."""
        salt = sequence.request.cache_key
        prefix = self.pool.longest_prefix(sequence.tokens[:-1], salt) if self.prefix_reuse else None
        if prefix is not None and prefix.length < MIN_PREFIX:
            prefix = None
        if self.prefix_reuse:
            self._on_moves(self.pool.bring(prefix))
        slot = self.pool.take(sequence.id, reservation(sequence, self.limits), salt)
        self._wait_no_more(sequence)
        sequence.slot, sequence.status = slot, Status.PREFILL
        if sequence.stats.admitted_s is None:
            sequence.stats.admitted_s = now
        if prefix is not None:
            self.pool.record(slot, sequence.tokens[: prefix.length], 0)
            sequence.computed = prefix.length
            if sequence.stats.preemptions == 0:  # afterwards it would find its own text again
                sequence.stats.prefix_tokens = prefix.length

    def has_read(self, sequence: Sequence, tokens: int) -> bool:
        """The target has read the next `tokens` tokens of a prompt; True where that was the rest of it."""
        start, end = sequence.computed, sequence.computed + tokens
        self.pool.record(sequence.held_slot, sequence.tokens[start:end], start)
        sequence.computed = end
        if end < len(sequence.tokens):
            return False
        sequence.status = Status.DECODE
        sequence.computed -= 1  # as in any window, the newest token is its root
        return True

    def preempt(self, sequence: Sequence) -> None:
        """Take the slot away; everything is read again later, the text stays."""
        self._leave_slot(sequence)
        self._wait(sequence)
        sequence.stats.preemptions += 1

    def recover(self, now: float) -> None:
        """A step broke off: what it wrote is not to be trusted. All that ran waits to be read again, or has ended."""
        for slot in range(self.pool.slots):  # a prompt that was to be copied may not have been
            self.pool.forget(slot)
        for sequence in self.running:
            if sequence.finish_reason is None:
                self.preempt(sequence)
            else:
                self.finish(sequence, now)

    def reserve_ahead(self) -> None:
        """Set aside what the next step may add to each running sequence."""
        for sequence in self.running:
            self.pool.reserve(sequence.id, reservation(sequence, self.limits))

    def end_request(self, request_id: str, now: float) -> None:
        """End all answers of a request as they stand; unknown ids are ignored."""
        for sequence in list(self._groups.get(request_id, ())):
            if not sequence.finished:
                self._cut(sequence, now)

    def end_expired(self, now: float) -> None:
        """End the sequences whose deadline has passed."""
        while self._deadlines and self._deadlines[0][0] < now:
            sequence = heappop(self._deadlines)[2]
            if not sequence.finished:
                self._cut(sequence, now)

    def finish(self, sequence: Sequence, now: float) -> None:
        """A sequence with a finish reason leaves; with the last of its request the output is made."""
        if sequence.status is Status.WAITING:
            self._wait_no_more(sequence)
        self._leave_slot(sequence)
        sequence.status = Status.FINISHED
        sequence.stats.finished_s = now
        text = self.texts.pop(sequence.id).text
        sequence.text = None if self.tokenizer is None else text
        del self.sequences[sequence.id]
        group = self._groups[sequence.request.id]
        if all(s.finished for s in group):
            del self._groups[sequence.request.id]
            self.done.append(output(sequence.request, group))

    def forget_drafts(self) -> None:
        """The draft's cache is void: the next draft reads every sequence again, also those the last one left out."""
        for sequence in self.sequences.values():
            sequence.draft_computed, sequence.draft_ok, sequence.uses_draft = 0, True, True
            sequence.proposer_failed = sequence.draft_unchecked = False

    def take_results(self) -> tuple[tuple[SequenceDelta, ...], tuple[RequestOutput, ...]]:
        """Gains and finished requests since the last call."""
        results = tuple(self.deltas), tuple(self.done)
        self.deltas, self.done = [], []
        return results

    def check_integrity(self) -> None:
        """Raise AssertionError where slots, sequences and statuses disagree."""
        self.pool.check_integrity()
        running = self.running
        assert all(s.slot == place for place, s in enumerate(running)), "a sequence is not in the slot it believes"
        waiting = [s for s in self.sequences.values() if s.status is Status.WAITING]
        assert all(s.slot is None for s in waiting), "a waiting sequence holds a slot"
        decoding = len(self.decoding)
        assert all(s.status is Status.DECODE for s in running[:decoding]), "decoding sequences come first"
        assert all(s.status is Status.PREFILL for s in running[decoding:]), "the others read their prompts"
        for place, s in enumerate(running):
            assert self.pool.contents[place] == s.tokens[: s.computed], f"slot {place} does not hold the text of {s.id}"
            assert self.pool.salts[place] == s.request.cache_key, f"slot {place} is not salted as {s.id} is"
        waiting = [s for s in self.sequences.values() if s.status is Status.WAITING]
        assert self.waiting == sorted(waiting, key=urgency), "the waiting list is not who waits, most urgent first"
        listed = {s.id for group in self._groups.values() for s in group if not s.finished}
        assert listed == set(self.sequences) == set(self.texts), "groups, sequences and texts differ"

    def _wait(self, sequence: Sequence) -> None:
        sequence.status = Status.WAITING
        insort(self.waiting, sequence, key=urgency)

    def _wait_no_more(self, sequence: Sequence) -> None:
        place = bisect_left(self.waiting, urgency(sequence), key=urgency)
        assert self.waiting[place] is sequence, f"{sequence.id} is not where it should wait"
        del self.waiting[place]

    def _new(self, request: Request, index: int, bad_words: tuple[tuple[int, ...], ...]) -> Sequence:
        params = request.params
        own = () if params.ignore_eos else self.stop_ids
        room = min(self.pool.max_len, self.pool.token_budget) - len(request.prompt_ids)
        self._arrivals += 1
        return Sequence(
            id=f"{request.id}/{index}",
            request=request,
            index=index,
            arrival=self._arrivals,
            tokens=list(request.prompt_ids),
            stop_ids=frozenset([*own, *params.stop_token_ids]),
            max_output=room if params.max_tokens is None else min(room, params.max_tokens),
            bad_words=bad_words,
        )

    def _cut(self, sequence: Sequence, now: float) -> None:
        sequence.finish_reason = "abort"
        self.deltas.append(delta(sequence, sequence.output_length, self.texts[sequence.id].flush()))
        self.finish(sequence, now)

    def _leave_slot(self, sequence: Sequence) -> None:
        if sequence.slot is None:
            return
        if sequence.status is Status.PREFILL:
            self._on_unjudged(sequence.slot)
            self.pool.forget(sequence.slot)
        self._on_leaving(sequence)
        moves = self.pool.release(sequence.slot, len(self.decoding))
        self._on_moves(moves)
        sequence.slot, sequence.computed, sequence.draft_computed = None, 0, 0
        for slot, owner in enumerate(self.pool.owners):
            self.sequences[owner].slot = slot
