"""Tenants take turns in the queue: a flood delays its own tenant, and nobody loses a place."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from distillspec.models import LanguageModel
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request
from distillspec.serving.sequences.turns import MANY, TenantTurns

from ..conftest import MakeEngine, prompts

ONE_TOKEN = SamplingParams(temperature=0.0, max_tokens=1)


def asked(tenant: str, priority: int = 0, name: str = "") -> Request:
    return Request(name or tenant, (1, 2, 3), ONE_TOKEN, priority=priority, tenant=tenant)


def test_a_tenant_that_comes_later_goes_with_the_first_of_those_who_wait() -> None:
    turns = TenantTurns()
    flood = [turns.take(asked("flood")) for _ in range(10)]
    assert flood == list(range(10))
    for turn in flood[:4]:
        turns.begin(asked("flood"), turn)
    late = [turns.take(asked("late")) for _ in range(3)]
    assert late == [3, 4, 5]  # before the flood's fifth, then by turns with it


def test_a_tenant_gains_nothing_by_silence() -> None:
    """Who sent nothing for long starts where the others are, not before them."""
    turns = TenantTurns()
    for _ in range(100):
        turns.begin(asked("busy"), turns.take(asked("busy")))
    assert [turns.take(asked("quiet")) for _ in range(2)] == [99, 100]


def test_priorities_are_queues_of_their_own() -> None:
    turns = TenantTurns()
    for _ in range(50):
        turns.take(asked("a", priority=5))
    assert turns.take(asked("a")) == turns.take(asked("b")) == 0


def test_tenants_who_wait_for_nothing_are_forgotten() -> None:
    turns = TenantTurns()
    for _ in range(5):
        turns.begin(asked("busy"), turns.take(asked("busy")))
    waiting = [turns.take(asked("x")) for _ in range(3)]
    for number in range(3 * MANY):
        turns.begin(asked(str(number)), turns.take(asked(str(number))))
        turns.begin(asked("busy"), turns.take(asked("busy")))
    assert turns.remembered <= MANY + 2
    assert waiting == [4, 5, 6]
    assert turns.take(asked("x")) == turns.take(asked("busy")) - 1  # its turns passed: it starts anew


def test_priorities_that_nobody_waits_with_are_forgotten() -> None:
    """A client may send any number: what is remembered of each must not grow."""
    turns = TenantTurns()
    for priority in range(3 * MANY):
        turns.begin(asked("a", priority), turns.take(asked("a", priority)))
    assert turns.remembered <= MANY + 1


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans()), max_size=60))
def test_no_tenant_is_more_than_one_answer_behind_another_that_waits(events: list[tuple[str, bool]]) -> None:
    """Whatever comes when: from the time when two tenants both wait, slots go to them by turns."""
    turns, waiting, arrivals = TenantTurns(), [], 0
    together: dict[str, Counter[str]] = {}  # since when two tenants wait both: slots of each
    for tenant, leaves in events:
        if leaves and waiting:
            turn, _, owner = waiting.pop(waiting.index(min(waiting)))
            turns.begin(asked(owner), turn)
            for pair, slots in together.items():
                slots[owner] += owner in pair
        else:
            arrivals += 1
            waiting.append((turns.take(asked(tenant)), arrivals, tenant))
        who = {owner for *_, owner in waiting}
        together = {pair: together.get(pair, Counter()) for pair in ("ab", "ac", "bc") if set(pair) <= who}
        assert all(abs(slots[one] - slots[other]) <= 2 for (one, other), slots in together.items())


def test_one_request_beside_a_flood_is_answered_at_once(target: LanguageModel, make_engine: MakeEngine) -> None:
    """Of two slots, with forty answers of another tenant before it, the first that is free is its own."""
    engine = make_engine(None, proposer="none", max_slots=2)
    for number in range(40):
        engine.submit(Request(f"flood {number}", tuple(prompts()[0]), SamplingParams(max_tokens=4), tenant="flood"))
    ended: list[str] = []
    while len(ended) < 4:
        ended += [output.request_id for output in engine.step().finished]
    engine.submit(Request("one", tuple(prompts()[1]), SamplingParams(max_tokens=4), tenant="other"))
    before = len(ended)
    while engine.has_work:
        ended += [output.request_id for output in engine.step().finished]
        engine.check_integrity()
    assert len(ended) == 41
    assert ended.index("one") - before <= 4  # two are in slots, and one may share its turn


def test_who_waits_keeps_its_turn_when_others_are_forgotten() -> None:
    turns = TenantTurns()
    for tenant in range(MANY + 1):
        turns.begin(asked(str(tenant)), turns.take(asked(str(tenant))))
    turns.begin(asked("late"), 5000)
    waits = turns.take(asked("silent before"))
    assert waits == 5000
    assert turns.take(asked("newcomer")) >= waits
