"""Who runs in the next step: a pure plan from who waits and who holds a slot."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from operator import attrgetter

from distillspec.serving.control.base import AdmissionController, AdmissionView, LengthController, WaitingView
from distillspec.serving.control.wrapped import innermost
from distillspec.serving.requests import Sequence, Status

urgency = attrgetter("request.priority", "arrival")  # smaller is sooner; no two sequences are equally urgent


@dataclass(frozen=True)
class Limits:
    """What the plan must stay within."""

    slots: int
    max_len: int  # tokens a slot
    cache_tokens: int  # over all slots
    prefill_chunk: int  # prompt tokens read a step
    lookahead: int  # drafted tokens a row may add, reserved ahead
    extra: int = 0  # nodes that wide trees have beside them, which take places too


@dataclass(frozen=True)
class Chunk:
    """Read the next `tokens` unread tokens of a sequence."""

    sequence_id: str
    tokens: int


@dataclass(frozen=True)
class SchedulePlan:
    """First `preempt`, then `admit` (in order), then read `prefill` and decode the rest."""

    preempt: tuple[str, ...] = ()
    admit: tuple[str, ...] = ()
    prefill: tuple[Chunk, ...] = ()


def reservation(sequence: Sequence, limits: Limits) -> int:
    """Tokens to set aside for a sequence's next step: its text, the drafted ones and one of the target's own."""
    final = sequence.prompt_length + sequence.max_output
    tokens = min(len(sequence.tokens) + limits.lookahead + 1, final)
    if not limits.extra:
        return tokens  # an answer is never given more than fits
    return min(tokens + limits.extra, limits.max_len, max(tokens, limits.cache_tokens))


def speculation_limit(sequence: Sequence, limits: Limits) -> int:
    """The most tokens that may be drafted for a sequence: the step adds one of the target's own to them."""
    params = sequence.request.params
    if not params.speculate or not sequence.draft_ok:
        return 0
    room = min(sequence.prompt_length + sequence.max_output, limits.max_len) - len(sequence.tokens) - 1
    return max(0, room if params.max_speculation is None else min(room, params.max_speculation))


def most_admitted(
    controller: LengthController, waiting: Seq[Sequence], running: Seq[Sequence], limits: Limits, now: float
) -> int | None:
    """How many of those who wait the controller lets in, those who go first first; None: it leaves that alone."""
    deciding = innermost(controller)
    if not waiting or not isinstance(deciding, AdmissionController):
        return None
    views = [WaitingView(s.id, len(s.tokens), now - s.stats.submitted_s) for s in waiting]
    running_tokens = tuple([len(sequence.tokens) for sequence in running])
    return deciding.admit(AdmissionView(running_tokens, tuple(views), limits.slots, limits.cache_tokens))


def plan_step(waiting: Seq[Sequence], running: Seq[Sequence], limits: Limits, most: int | None = None) -> SchedulePlan:
    """Who is preempted, who is admitted (at most `most`), and how much of whose prompt is read.

    Lower `priority` first, equal ones in order of arrival; `waiting` comes in that order, and only as many as get in
    are looked at. Sequences that run are preempted, the last first, when their next step does not fit the cache, or
    when a more urgent one waits and finds no slot. The first in order always fits: a request larger than the cache is
    refused at the door. Changes nothing.
    """
    needs = {s.id: reservation(s, limits) for s in running}
    kept, preempted = _keep_what_fits(running, needs, limits)
    admitted: list[Sequence] = []
    prefill_left = limits.prefill_chunk - sum(_unread(s) for s in kept if s.status is Status.PREFILL)
    for sequence in waiting:
        if len(admitted) == most:
            break
        if prefill_left <= 0 or (preempted and urgency(sequence) > min(map(urgency, preempted))):
            break  # whoever lost a slot gets the next one, before any who come after
        needs[sequence.id] = reservation(sequence, limits)
        victims = _make_room(sequence, kept, admitted, needs, limits)
        if victims is None:
            break  # first come, first served: nobody overtakes the first that does not fit
        preempted += victims
        gone = {s.id for s in victims}
        kept = [s for s in kept if s.id not in gone]
        admitted.append(sequence)
        prefill_left -= len(sequence.tokens)
    prefilling = [s for s in kept if s.status is Status.PREFILL]
    return SchedulePlan(
        tuple(s.id for s in preempted),
        tuple(s.id for s in admitted),
        _chunks(sorted(prefilling, key=lambda s: s.held_slot) + admitted, limits.prefill_chunk),
    )


def _keep_what_fits(
    running: Seq[Sequence], needs: Mapping[str, int], limits: Limits
) -> tuple[list[Sequence], list[Sequence]]:
    """Most urgent first, as many as the cache holds; the rest loses its slot."""
    if sum(needs.values()) <= limits.cache_tokens:
        return list(running), []  # as nearly always: nothing to put in order
    kept: list[Sequence] = []
    room, by_urgency = limits.cache_tokens, sorted(running, key=urgency)
    for place, sequence in enumerate(by_urgency):
        room -= needs[sequence.id]
        if room < 0 and kept:
            return kept, by_urgency[place:]
        kept.append(sequence)
    return kept, []


def _make_room(
    sequence: Sequence, kept: Seq[Sequence], admitted: Seq[Sequence], needs: Mapping[str, int], limits: Limits
) -> list[Sequence] | None:
    """Who must go for `sequence` to fit (nobody: []); None where it has to wait."""
    victims: list[Sequence] = []
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


def _chunks(sequences: Seq[Sequence], budget: int) -> tuple[Chunk, ...]:
    """Deal out the step's prompt tokens in slot order, so that prompts are finished in that order."""
    chunks = []
    for sequence in sequences:
        tokens = min(budget, _unread(sequence))
        if tokens <= 0:
            break
        chunks.append(Chunk(sequence.id, tokens))
        budget -= tokens
    return tuple(chunks)


def _unread(sequence: Sequence) -> int:
    return len(sequence.tokens) - sequence.computed
