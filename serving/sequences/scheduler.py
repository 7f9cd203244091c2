"""Scheduler: a pure plan of the next step, from waiting and running sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from distillspec.serving.base.controllers import AdmissionController, AdmissionView, LengthController, WaitingView
from distillspec.serving.base.requests import SequenceState, Status
from distillspec.serving.base.wrapped import innermost

MIN_PREFIX = 16  # shared tokens below which copying is not worth it

urgency = attrgetter("request.priority", "turn", "arrival")  # a smaller value runs first; no two are equal


@dataclass(frozen=True)
class Limits:
    """Limits that every plan keeps."""

    slots: int
    max_len: int  # tokens a slot
    cache_tokens: int  # over all slots
    prefill_chunk: int  # prompt tokens read a step
    lookahead: int  # drafted tokens a row may add, reserved ahead
    extra: int = 0  # further nodes of wide trees, which take places too
    block: int = 1  # memory is taken by so many tokens at a time


@dataclass(frozen=True)
class Chunk:
    """The next `tokens` unread tokens of a sequence, to be read in this step."""

    sequence_id: str
    tokens: int


class HeldTexts(Protocol):
    """Texts in slots, as far as plans depend on them."""

    def cached_tokens(self, sequence: SequenceState) -> int:
        """Return how many leading tokens of a waiting sequence slots hold already."""
        ...

    def shared_tokens(self, running: Sequence[SequenceState]) -> Mapping[str, int]:
        """Return how many tokens of each sequence's memory a more urgent one holds too. Others are left out."""
        ...

    def shareable_tokens(self, sequence: SequenceState, running: Sequence[SequenceState]) -> int:
        """Return for how many tokens a waiting sequence would at least use memory that `running` hold."""
        ...


class NoTexts:
    """Slots that hold nothing which others could use."""

    def cached_tokens(self, sequence: SequenceState) -> int:
        return 0

    def shared_tokens(self, running: Sequence[SequenceState]) -> Mapping[str, int]:
        return {}

    def shareable_tokens(self, sequence: SequenceState, running: Sequence[SequenceState]) -> int:
        return 0


NO_TEXTS = NoTexts()


@dataclass(frozen=True)
class SchedulePlan:
    """First `preempt`, then `admit` (in order), then read `prefill` and decode the rest.

    `sharing`: those admitted that fit because they share memory of running ones.
    """

    preempt: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    prefill: tuple[Chunk, ...] = ()
    sharing: frozenset[str] = frozenset()


def reservation(sequence: SequenceState, limits: Limits) -> int:
    """Return the tokens to reserve for a sequence's next step: its text, drafted ones and one of the target's own."""
    final = sequence.prompt_length + sequence.max_output
    tokens = min(len(sequence.tokens) + limits.lookahead + 1, final)  # an answer is never given more than fits
    if limits.extra:
        tokens = min(tokens + limits.extra, max(tokens, limits.cache_tokens))
    return min(-(-tokens // limits.block) * limits.block, limits.max_len)


def speculation_limit(sequence: SequenceState, limits: Limits) -> int:
    """Return the most tokens that may be drafted for a sequence. The step adds one of the target's own."""
    params = sequence.request.params
    if not params.speculate or not sequence.speculates:
        return 0
    room = min(sequence.prompt_length + sequence.max_output, limits.max_len) - len(sequence.tokens) - 1
    return max(0, room if params.speculation_length is None else min(room, params.speculation_length))


def most_admitted(
    controller: LengthController,
    waiting: Sequence[SequenceState],
    running: Sequence[SequenceState],
    limits: Limits,
    now: float,
) -> int | None:
    """Return how many waiting sequences the controller admits, None where it does not decide."""
    deciding = innermost(controller)
    if not waiting or not isinstance(deciding, AdmissionController):
        return None
    views = [WaitingView(s.id, len(s.tokens), now - s.stats.submitted_s) for s in waiting]
    running_tokens = tuple([len(sequence.tokens) for sequence in running])
    return deciding.admit(AdmissionView(running_tokens, tuple(views), limits.slots, limits.cache_tokens))


def plan_step(
    waiting: Sequence[SequenceState],
    running: Sequence[SequenceState],
    limits: Limits,
    most: int | None = None,
    held: HeldTexts = NO_TEXTS,
) -> SchedulePlan:
    """Plan preemptions, admissions (at most `most`) and the prompt tokens to read. Changes nothing.

    Lower `priority` goes first, equal ones by the turns of their tenants (`TenantTurns`). `waiting` is in that order.
    Running sequences are preempted, the last first, if their next step does not fit the cache, or if one of a lower
    `priority` waits and finds no slot. The first in order always fits, for `submit` refuses requests larger than the
    cache. An answer whose prompt is being read for another answer waits for that, and its place is kept. Shared memory
    counts once.
    """
    planning = _Planning(running, limits, held)
    for sequence in waiting:
        if len(planning.admitted) == most or not planning.take(sequence):
            break
    return planning.plan()


class _Planning:
    """A plan in the making. Starts with the preemptions that running sequences need among themselves."""

    def __init__(self, running: Sequence[SequenceState], limits: Limits, held: HeldTexts) -> None:
        self.limits = limits
        self.held = held
        self.needs = _needs(running, limits, held)
        self.kept, self.preempted = _keep_what_fits(running, self.needs, limits)
        self.admitted: list[SequenceState] = []
        self.held_back: list[SequenceState] = []  # places of these are kept
        self.sharing: set[str] = set()
        prefilling = [s for s in self.kept if s.status is Status.PREFILL]
        self.unread = {s.id: len(s.tokens) - s.computed for s in prefilling}
        self.urgencies = {s.id: urgency(s) for s in prefilling}
        self.requests_read = {s.request.id for s in prefilling}
        self._cached: dict[tuple[str, int], int] = {}

    def take(self, sequence: SequenceState) -> bool:
        """Admit a waiting sequence, or keep its place. False: it has to wait, and so have those after it."""
        if self._unread_before(sequence) >= self.limits.prefill_chunk:
            return False  # what is less urgent is read after it
        if self.preempted and urgency(sequence) > min(map(urgency, self.preempted)):
            return False  # preempted sequences get the next slot before any that come after them
        self.needs[sequence.id] = reservation(sequence, self.limits)
        victims = self._find_victims(sequence)
        if victims is None:
            return False  # none overtakes the first that does not fit
        cached = self._cached_tokens(sequence)
        is_read = sequence.request.id in self.requests_read  # for another answer
        if is_read and max(cached, MIN_PREFIX) < sequence.prompt_length - 1:
            self.held_back.append(sequence)
        else:
            self._admit(sequence, victims, cached)
        return True

    def plan(self) -> SchedulePlan:
        """Return the plan, with the prompt tokens to read."""
        prefilling = [s for s in self.kept if s.status is Status.PREFILL]
        reading = sorted(prefilling + self.admitted, key=urgency)
        chunks = _chunks({s.id: self.unread[s.id] for s in reading}, self.limits.prefill_chunk)
        admitted = tuple(s.id for s in self.admitted)
        sharing = frozenset(self.sharing.intersection(admitted))
        return SchedulePlan(tuple(s.id for s in self.preempted), admitted, chunks, sharing)

    def _unread_before(self, sequence: SequenceState) -> int:
        """Return the prompt tokens that are read before those of a waiting sequence."""
        return sum([unread for name, unread in self.unread.items() if self.urgencies[name] <= urgency(sequence)])

    def _find_victims(self, sequence: SequenceState) -> list[SequenceState] | None:
        """Return the sequences to preempt so that a waiting one fits, None if it does not fit.

        Where memory is short, it needs less by what it shares, and that it shares is noted.
        """
        others = self.admitted + self.held_back
        victims = _make_room(sequence, self.kept, others, self.needs, self.limits)
        if victims == [] or len(self.kept) + len(others) >= self.limits.slots:
            return victims
        # Memory is short. Those of its own priority and above are never preempted for it, so it may share theirs.
        staying = [s for s in self.kept if s.request.priority <= sequence.request.priority]
        shared = self.held.shareable_tokens(sequence, staying)
        self.needs[sequence.id] -= shared
        if shared:
            self.sharing.add(sequence.id)
        return _make_room(sequence, self.kept, others, self.needs, self.limits)

    def _cached_tokens(self, sequence: SequenceState) -> int:
        """Return what `HeldTexts.cached_tokens` does, asked once for all answers to one prompt: they find the same."""
        prompt = (sequence.request.id, len(sequence.tokens))
        if prompt not in self._cached:
            self._cached[prompt] = self.held.cached_tokens(sequence)
        return self._cached[prompt]

    def _admit(self, sequence: SequenceState, victims: Sequence[SequenceState], cached: int) -> None:
        self.preempted += victims
        gone = {s.id for s in victims}
        self.unread = {name: unread for name, unread in self.unread.items() if name not in gone}
        self.kept = [s for s in self.kept if s.id not in gone]
        self.admitted.append(sequence)
        self.unread[sequence.id] = len(sequence.tokens) - cached
        self.urgencies[sequence.id] = urgency(sequence)
        self.requests_read.add(sequence.request.id)


def _needs(running: Sequence[SequenceState], limits: Limits, held: HeldTexts) -> dict[str, int]:
    """Return the tokens of memory that each running sequence takes beside what a more urgent one holds anyway."""
    needs = {s.id: reservation(s, limits) for s in running}
    for sequence_id, tokens in held.shared_tokens(running).items():
        needs[sequence_id] -= tokens
    return needs


def _keep_what_fits(
    running: Sequence[SequenceState], needs: Mapping[str, int], limits: Limits
) -> tuple[list[SequenceState], list[SequenceState]]:
    """Split running sequences into those that the cache holds, most urgent first, and those to preempt."""
    if sum(needs.values()) <= limits.cache_tokens:
        return list(running), []  # the usual case, without sorting
    kept: list[SequenceState] = []
    room, by_urgency = limits.cache_tokens, sorted(running, key=urgency)
    for place, sequence in enumerate(by_urgency):
        room -= needs[sequence.id]
        if room < 0 and kept:
            return kept, by_urgency[place:]
        kept.append(sequence)
    return kept, []


def _make_room(
    sequence: SequenceState,
    kept: Sequence[SequenceState],
    admitted: Sequence[SequenceState],
    needs: Mapping[str, int],
    limits: Limits,
) -> list[SequenceState] | None:
    """Return the sequences to preempt so that `sequence` fits, None if it has to wait."""
    victims: list[SequenceState] = []
    less_urgent = sorted((s for s in kept if s.request.priority > sequence.request.priority), key=urgency)
    while True:
        gone = {s.id for s in victims}
        staying = [s for s in [*kept, *admitted] if s.id not in gone]
        tokens = sum([needs[s.id] for s in staying]) + needs[sequence.id]
        if len(staying) < limits.slots and tokens <= limits.cache_tokens:
            return victims
        if not less_urgent:
            return None
        victims.append(less_urgent.pop())


def _chunks(unread: Mapping[str, int], budget: int) -> tuple[Chunk, ...]:
    """Distribute the step's prompt tokens in order, given the unread tokens of sequences."""
    chunks = []
    for sequence_id, count in unread.items():
        tokens = min(budget, count)
        if tokens <= 0:
            break
        chunks.append(Chunk(sequence_id, tokens))
        budget -= tokens
    return tuple(chunks)
