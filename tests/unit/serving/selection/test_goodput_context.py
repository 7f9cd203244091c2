"""Selection by goodput goes by the place in the answer, and by text that a lookup finds again."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.base.tree import LOOKUP
from distillspec.serving.selection.base import Choices
from distillspec.serving.selection.goodput import GoodputSelection
from distillspec.serving.selection.lbss import Lbss

from .steps import World, parts, row

BOTH = {"a": {"x": 0.0}, "b": {"x": 0.0}}
GOOD, BAD = 0.75, 0.2
SWITCH, LONG = 96, 224  # tokens of an answer at which the other draft becomes the better one, and of all


class Placed(World):
    """Draft a is good in the first tokens of an answer, b in the others."""

    def chance(self, source: str, domain: str, one: RowView) -> float:
        is_late = one.context_tokens - len(one.prompt) >= SWITCH
        return GOOD if (source == "b") == is_late else BAD

    def served_late(self, answers: int) -> float:
        """Return the share of the tokens behind the switch that b writes."""
        late, by_b = 0, 0
        for _ in range(answers):
            written = self.written = list[tuple[int, str, int]]()
            self.serve("x", LONG)
            late += sum(count for at, _, count in written if at >= SWITCH)
            by_b += sum(count for at, source, count in written if at >= SWITCH and source == "b")
        return by_b / late

    written: list[tuple[int, str, int]]  # tokens before a step, its draft, and tokens of the step

    def step(self, view: BatchView, chosen: Choices, domain: str) -> int:
        (one,) = view.rows
        emitted = super().step(view, chosen, domain)
        self.written.append((one.context_tokens - len(one.prompt), chosen[one.sequence_id] or "", emitted))
        return emitted


class Matched(World):
    """Draft a is good where a lookup finds the text again, b elsewhere. Domain and prompt do not tell."""

    found = False

    def row(self, name: str, written: int, domain: str) -> RowView:
        return row(name, tuple(self.chances), written=written, domain=domain, free=(LOOKUP,) if self.found else ())

    def chance(self, source: str, domain: str, one: RowView) -> float:
        matches = any(option.source == LOOKUP for option in one.options)
        return GOOD if (source == "a") == matches else BAD


def test_a_draft_that_is_good_late_in_answers_is_chosen_late() -> None:
    world = Placed(GoodputSelection(parts()), BOTH)
    world.served_late(120)
    assert world.served_late(20) > 0.8
    first = [source for _ in range(10) for source in first_drafts(world)]
    assert first.count("a") > 0.8 * len(first)


def first_drafts(world: Placed) -> list[str]:
    """Return the draft of each token of an answer's first 48."""
    world.written = []
    world.serve("x", 48)
    return [source for _, source, count in world.written for _ in range(count)]


def test_a_draft_that_is_good_where_a_lookup_finds_something_is_chosen_there() -> None:
    world = Matched(GoodputSelection(parts()), BOTH)
    shares = {True: 0.0, False: 0.0}
    for number in range(240):
        world.found = number % 2 == 0
        by = world.serve("x")
        if number >= 160:
            shares[world.found] += by.get("a", 0) / sum(by.values()) / 40
    assert shares[True] > 0.85
    assert shares[False] < 0.15


@pytest.mark.parametrize("make", [GoodputSelection, Lbss])
def test_asked_again_in_a_step_it_answers_alike_and_learns_the_same(make: type[GoodputSelection | Lbss]) -> None:
    """Also in steps of a review, in which trials are learnt from and features are taken anew."""
    once, twice = Placed(make(parts()), BOTH, seed=3), Placed(make(parts()), BOTH, seed=3)
    choose = twice.selection.choose

    def again(rows: Sequence[RowView]) -> Choices:
        first = dict(choose(rows))
        assert dict(choose(rows)) == first
        return first

    twice.selection.choose = again  # type: ignore[method-assign]
    once.served_late(12)
    twice.served_late(12)
    assert once.written == twice.written
