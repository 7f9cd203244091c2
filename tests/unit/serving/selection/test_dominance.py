"""One draft for all: noticed when it is certain, and doubted at a change."""

from __future__ import annotations

import pytest

from distillspec.serving.base.draft_change import DraftChange
from distillspec.serving.selection.dominance import ACCEPTANCE_DROP, CALM_ANSWERS, Dominance
from distillspec.serving.selection.goodput import GoodputSelection

from .steps import World, parts


def certain(kinds: tuple[str, ...] = ("maths", "sql")) -> Dominance:
    found = Dominance()
    for number in range(CALM_ANSWERS):
        assert found.draft is None
        found.is_certain(kinds[number % len(kinds)], "a", 0.7)
    assert found.draft == "a"
    return found


def test_it_takes_calm_answers_in_a_row_of_one_draft() -> None:
    found = Dominance()
    for number in range(3 * CALM_ANSWERS):
        if number % (CALM_ANSWERS - 1) == 0:
            found.doubted()
        found.is_certain("maths", "a", 0.7)
    assert found.draft is None
    for number in range(3 * CALM_ANSWERS):
        found.is_certain(("maths", "sql")[number % 2], "ab"[number % 2], 0.7)
    assert found.draft is None, "each kind has a draft of its own"
    for number in range(3 * CALM_ANSWERS):
        found.is_certain("sql", "ab"[number % 2], 0.7)
    assert found.draft is None, "answers of one kind have several"


@pytest.mark.parametrize(("kind", "chance"), [("chat", 0.7), ("maths", 0.7 - ACCEPTANCE_DROP - 0.01)])
def test_another_kind_and_a_fall_are_changes(kind: str, chance: float) -> None:
    found = certain()
    assert found.covers("sql", 0.7 - ACCEPTANCE_DROP + 0.01)
    assert found.covers("maths", 0.9)
    assert not found.covers(kind, chance)
    assert not found.covers("maths", 0.7)
    for _ in range(CALM_ANSWERS):
        found.is_certain("maths", "a", 0.7)
    assert found.covers("maths", 0.7)


def dominated() -> tuple[World, dict[str, dict[str, float]]]:
    """Return a world in which draft a is the best for all requests, after 400 of them."""
    chances = {"a": {"maths": 0.75, "sql": 0.7, "chat": 0.7}, "b": {"maths": 0.3, "sql": 0.25, "chat": 0.7}}
    world = World(GoodputSelection(parts()), chances)
    serve(world, 400)
    return world, chances


def serve(world: World, answers: int) -> tuple[int, int]:
    """Serve maths and SQL by turns. Return the drawn drafts and the reviews."""
    selection = world.selection
    assert isinstance(selection, GoodputSelection)
    before = selection.draws, selection.reviews
    for number in range(answers):
        world.serve(("maths", "sql")[number % 2])
    return selection.draws - before[0], selection.reviews - before[1]


def test_while_one_draft_dominates_nothing_is_drawn_or_reviewed() -> None:
    world, _ = dominated()
    assert serve(world, 100) == (0, 0)
    assert world.share("a", "sql", 50) == 1.0


def test_without_a_draft_that_dominates_every_answer_is_drawn_and_reviewed() -> None:
    chances = {"a": {"maths": 0.75, "sql": 0.2}, "b": {"maths": 0.25, "sql": 0.7}}
    world = World(GoodputSelection(parts()), chances)
    serve(world, 400)
    draws, reviews = serve(world, 50)
    assert draws == 50
    assert reviews >= 50


def test_a_swap_starts_it_again_and_the_better_draft_is_found() -> None:
    world, chances = dominated()
    chances["b"] = {"maths": 0.9, "sql": 0.9}
    world.selection.draft_changed(DraftChange("b"))
    draws, reviews = serve(world, 30)
    assert draws == 30
    assert reviews > 0
    serve(world, 170)
    serve(world, 40)
    assert world.share("b", "maths", 20) > 0.9
    assert serve(world, 400)[0] < 300, "and then it is off again"


def test_drift_starts_it_again() -> None:
    world, chances = dominated()
    chances["a"] = {"maths": 0.02, "sql": 0.02}
    serve(world, 30)
    serve(world, 40)
    assert world.share("b", "maths", 20) > 0.9


def test_a_domain_that_is_new_starts_it_again() -> None:
    world, _ = dominated()
    selection = world.selection
    assert isinstance(selection, GoodputSelection)
    before = selection.draws
    for _ in range(10):
        world.serve("chat")
    assert selection.draws == before + 10
