"""Slots have one owner each and planning stays within its limits, whatever happens."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace

from hypothesis import given
from hypothesis import strategies as st

from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request, SequenceState, Status
from distillspec.serving.base.wrapped import WrappedController
from distillspec.serving.baselines.smartspec import SmartSpecController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.sequences.scheduler import (
    Chunk,
    Limits,
    SchedulePlan,
    most_admitted,
    plan_step,
    reservation,
    urgency,
)

LIMITS = Limits(slots=3, max_len=64, cache_tokens=150, prefill_chunk=32, lookahead=4)


def sequence(
    name: str,
    *,
    prompt: int = 10,
    priority: int = 0,
    arrival: int = 0,
    status: Status = Status.WAITING,
    slot: int | None = None,
    output: int = 0,
    max_output: int = 20,
) -> SequenceState:
    request = Request(name, tuple(range(prompt)), SamplingParams(max_tokens=max_output), priority=priority)
    tokens = list(range(prompt + output))
    return SequenceState(name, request, 0, arrival, tokens, frozenset(), max_output, status=status, slot=slot)


def running(name: str, slot: int, **extra: int) -> SequenceState:
    made = sequence(name, status=Status.DECODE, slot=slot, arrival=slot, **extra)
    made.computed = len(made.tokens) - 1
    return made


@dataclass
class Held:
    """What a plan is told of the slots."""

    cached: Callable[[SequenceState], int] = lambda sequence: 0
    shared: Mapping[str, int] = field(default_factory=dict)
    shareable: Callable[[Sequence[SequenceState]], int] = lambda running: 0

    def cached_tokens(self, sequence: SequenceState) -> int:
        return self.cached(sequence)

    def shared_tokens(self, running: Sequence[SequenceState]) -> Mapping[str, int]:
        return {s.id: self.shared[s.id] for s in running if s.id in self.shared}

    def shareable_tokens(self, sequence: SequenceState, running: Sequence[SequenceState]) -> int:
        return self.shareable(running)


def test_first_come_first_served_within_slots() -> None:
    waiting = [sequence(name, arrival=i) for i, name in enumerate("abcd")]
    plan = plan_step(waiting, [], LIMITS)
    assert plan.admit == ("a", "b", "c")
    assert plan.prefill == (Chunk("a", 10), Chunk("b", 10), Chunk("c", 10))


def test_a_controller_may_hold_requests_back_but_not_for_long() -> None:
    dear = LatencyModel(CostTable.line(1e-2, 1e-3, 1e-2))
    controller = SmartSpecController(4, dear, max_wait_s=1.0)
    limits = replace(LIMITS, slots=8, cache_tokens=400)
    slots = [running(name, slot, prompt=1) for slot, name in enumerate("ab")]
    waiting = [sequence("long", prompt=60, arrival=8), sequence("next", prompt=60, arrival=9)]
    assert most_admitted(FixedLength(2), waiting, slots, limits, 0.5) is None
    assert most_admitted(controller, [], slots, limits, 0.5) is None
    assert most_admitted(controller, waiting, slots, limits, 0.5) == 0
    assert most_admitted(WrappedController(controller), waiting, slots, limits, 0.5) == 0
    assert plan_step(waiting, slots, limits, 0).admit == ()
    waiting[1].stats.submitted_s = 1.0
    late = most_admitted(controller, waiting, slots, limits, 1.5)  # the first has waited too long, the next has not
    assert plan_step(waiting, slots, limits, late).admit == ("long",)


def test_a_long_prompt_is_read_in_chunks_and_others_wait_behind_it() -> None:
    long = sequence("long", prompt=50)
    plan = plan_step([long, sequence("short", arrival=1)], [], LIMITS)
    assert plan.admit == ("long",)
    assert plan.prefill == (Chunk("long", 32),)
    long.status, long.slot, long.computed = Status.PREFILL, 0, 32
    plan = plan_step([sequence("short", arrival=1)], [long], LIMITS)
    assert plan.prefill == (Chunk("long", 18), Chunk("short", 10))


def test_priorities_come_first_and_preempt_the_last_of_the_less_urgent() -> None:
    slots = [running("a", 0, priority=1), running("b", 1, priority=2), running("c", 2, priority=2)]
    plan = plan_step([sequence("urgent", arrival=10), sequence("late", arrival=9, priority=2)], slots, LIMITS)
    assert plan.preempt == ("c",)
    assert plan.admit == ("urgent",)


def test_an_urgent_request_does_not_wait_for_a_less_urgent_ones_prompt() -> None:
    long = sequence("long", priority=1, prompt=50, status=Status.PREFILL, slot=0)
    plan = plan_step([sequence("urgent", arrival=9)], [long], LIMITS)
    assert (plan.preempt, plan.admit) == ((), ("urgent",))
    assert plan.prefill == (Chunk("urgent", 10), Chunk("long", 22))
    assert plan_step([sequence("alike", arrival=9, priority=1)], [long], LIMITS).admit == ()


def test_what_does_not_fit_the_cache_is_preempted_the_last_first_and_the_first_never() -> None:
    tight = Limits(slots=3, max_len=64, cache_tokens=40, prefill_chunk=32, lookahead=4)
    slots = [running("a", 0, output=10), running("b", 1, output=10)]
    assert plan_step([], slots, tight).preempt == ("b",)
    assert plan_step([], slots[:1], Limits(3, 64, 10, 32, 4)).preempt == ()


def test_memory_is_reserved_by_blocks() -> None:
    blocks = replace(LIMITS, block=16)
    tokens = [reservation(sequence("a", prompt=prompt), blocks) for prompt in (10, 11, 12, 58, 64)]
    assert tokens == [16, 16, 32, 64, 64]
    waiting = [sequence(name, prompt=12) for name in "abc"]
    assert plan_step(waiting, [], replace(blocks, cache_tokens=95)).admit == ("a", "b")


def test_nobody_overtakes_the_first_that_does_not_fit() -> None:
    tight = Limits(slots=3, max_len=64, cache_tokens=55, prefill_chunk=64, lookahead=4)
    waiting = [sequence("big", prompt=40, arrival=0), sequence("small", prompt=2, arrival=1)]
    plan = plan_step(waiting, [running("a", 0)], tight)
    assert plan.admit == ()


sequences_in = st.lists(st.tuples(st.integers(1, 50), st.integers(0, 13), st.integers(0, 2)), min_size=0, max_size=8)


@given(waiting=sequences_in, held=sequences_in, budget=st.integers(64, 192), chunk=st.integers(1, 64))
def test_plans_stay_within_their_limits(
    waiting: list[tuple[int, int, int]], held: list[tuple[int, int, int]], budget: int, chunk: int
) -> None:
    limits = Limits(slots=4, max_len=64, cache_tokens=budget, prefill_chunk=chunk, lookahead=3)
    running_ = [
        running(f"r{slot}", slot, prompt=prompt, output=output, priority=priority, max_output=14)
        for slot, (prompt, output, priority) in enumerate(held[:4])
    ]
    waiting_ = [
        sequence(f"w{i}", prompt=prompt, priority=priority, arrival=10 + i)
        for i, (prompt, _, priority) in enumerate(waiting)
    ]
    waiting_.sort(key=urgency)
    before = deepcopy((waiting_, running_))
    plan = plan_step(waiting_, running_, limits)
    assert (waiting_, running_) == before, "planning changes nothing"
    kept = [s for s in running_ if s.id not in plan.preempt]
    admitted = [s for s in waiting_ if s.id in plan.admit]
    assert len(kept) + len(admitted) <= 4
    if len(kept) + len(admitted) > 1:
        assert sum(reservation(s, limits) for s in [*kept, *admitted]) <= budget
    assert sum(c.tokens for c in plan.prefill) <= chunk
    assert all(c.tokens >= 1 for c in plan.prefill)
    if waiting_ and not kept:
        assert plan.admit, "something always goes on"


def test_cached_tokens_are_neither_planned_nor_charged() -> None:
    waiting = [sequence(name, prompt=1004, arrival=i) for i, name in enumerate("abc")]
    limits = Limits(slots=3, max_len=1100, cache_tokens=3300, prefill_chunk=512, lookahead=4)
    assert plan_step(waiting, [], limits).prefill == (Chunk("a", 512),)
    plan = plan_step(waiting, [], limits, held=Held(lambda s: 1000))
    assert plan.admit == ("a", "b", "c")
    assert plan.prefill == (Chunk("a", 4), Chunk("b", 4), Chunk("c", 4))


def test_answers_to_one_prompt_wait_until_it_is_read_and_none_takes_their_place() -> None:
    request = Request("r", tuple(range(30)), SamplingParams(n=2))
    first, second = (SequenceState(f"r/{i}", request, i, i, list(range(30)), frozenset(), 9) for i in range(2))
    others = [sequence(name, prompt=1, arrival=i) for i, name in enumerate("xy", start=2)]
    assert plan_step([first, second, *others], [], LIMITS).admit == ("r/0", "x"), "a slot is kept for r/1"
    first.status, first.slot, first.computed = Status.PREFILL, 0, 20
    assert plan_step([second, *others], [first], LIMITS).admit == ("x",)
    assert plan_step([second], [first], LIMITS, held=Held(lambda s: 20)).admit == ()
    assert plan_step([second], [first], LIMITS, held=Held(lambda s: 29)).admit == ("r/1",), "another slot holds it"
    first.status, first.computed = Status.DECODE, 29
    plan = plan_step([second, *others], [first], LIMITS, held=Held(lambda s: 29 * (s is second)))
    assert plan.prefill == (Chunk("r/1", 1), Chunk("x", 1))


def test_shared_memory_counts_once() -> None:
    """Each row takes 15 tokens (10 and 5 to write), of which the later two share 8 with the first."""
    slots = [running(name, slot) for slot, name in enumerate("abc")]
    tight = replace(LIMITS, cache_tokens=29)
    assert plan_step([], slots, tight).preempt == ("b", "c")
    assert plan_step([], slots, tight, held=Held(shared={"b": 8, "c": 8})).preempt == ()
    assert plan_step([], slots, replace(tight, cache_tokens=28), held=Held(shared={"b": 8, "c": 8})).preempt == ("c",)


def test_a_prompt_that_running_sequences_hold_needs_room_for_the_rest_alone() -> None:
    first, late = running("a", 0), running("b", 1, priority=5)
    limits = replace(LIMITS, cache_tokens=37)
    waiting = [sequence("w", arrival=9, priority=1)]
    assert plan_step(waiting, [first, late], limits).preempt == ("b",)
    held = Held(shareable=lambda rows: 8 * (first in rows))
    shares = SchedulePlan((), ("w",), (Chunk("w", 10),), frozenset("w"))
    assert plan_step(waiting, [first, late], limits, held=held) == shares
    lost = Held(shareable=lambda rows: 8 * (late in rows))
    assert plan_step(waiting, [first, late], limits, held=lost).preempt == ("b",), "it is no help: it may have to go"
