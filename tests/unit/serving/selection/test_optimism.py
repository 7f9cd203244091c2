"""Optimism about drafts of which little is known: for a bounded number of tokens and answers of each kind."""

from __future__ import annotations

from distillspec.serving.selection.optimism import ENOUGH_TOKENS, OPTIMISTIC_ANSWERS, Optimism

USUAL = 0.7
MATHS, SQL = "maths", "sql"


def known() -> Optimism:
    """Return the optimism about three drafts after many answers of one kind, in which all were tried."""
    found = Optimism()
    for source in "abc":
        found.saw(source, MATHS, 3 * ENOUGH_TOKENS)
    end(found)
    return found


def end(optimism: Optimism, kind: str = MATHS) -> None:
    for _ in range(OPTIMISTIC_ANSWERS):
        optimism.begun(kind)


def optimistic(optimism: Optimism, kind: str = MATHS) -> str:
    return "".join([source for source in "abc" if optimism.tries(source, kind)])


def test_at_first_all_are_estimated_so_until_enough_of_each_was_tried() -> None:
    found = Optimism()
    assert (optimistic(found), found.chance) == ("abc", 0.0)
    found.saw("b", MATHS, ENOUGH_TOKENS - 1)
    assert optimistic(found) == "abc"
    found.saw("b", MATHS, 1)
    assert (optimistic(found), optimistic(found, SQL)) == ("ac", "abc")


def test_answers_of_a_kind_end_it_for_all_drafts() -> None:
    found = Optimism()
    for _ in range(OPTIMISTIC_ANSWERS):
        assert optimistic(found) == "abc"
        found.begun(MATHS)
    assert (optimistic(found), optimistic(found, SQL)) == ("", "abc")


def test_all_but_the_one_that_collapsed_are_taken_to_be_as_good() -> None:
    found = known()
    assert optimistic(found) == ""
    found.collapsed("a", USUAL)
    assert (optimistic(found), optimistic(found, SQL), found.chance) == ("bc", "bc", USUAL)
    found.saw("b", MATHS, ENOUGH_TOKENS)
    assert (optimistic(found), optimistic(found, SQL)) == ("c", "bc")
    end(found)
    assert (optimistic(found), found.chance) == ("", 0.0)


def test_a_second_collapse_does_not_let_drafts_be_tried_twice() -> None:
    found = known()
    found.collapsed("a", USUAL)
    found.saw("b", MATHS, ENOUGH_TOKENS)
    found.collapsed("b", 0.6)
    assert (optimistic(found), optimistic(found, SQL), found.chance) == ("c", "c", 0.6)


def test_a_later_one_lets_all_others_be_tried() -> None:
    found = known()
    found.collapsed("a", USUAL)
    found.saw("b", MATHS, ENOUGH_TOKENS)
    end(found)
    found.collapsed("b", 0.6)
    assert optimistic(found) == "ac"


def test_one_that_is_another_now_is_among_them_and_not_taken_to_be_as_good_as_an_old_one() -> None:
    found = known()
    found.collapsed("a", USUAL)
    for source in "bc":
        found.saw(source, MATHS, ENOUGH_TOKENS)
    end(found)
    found.changed("b")
    assert (optimistic(found), found.chance) == ("b", 0.0)
    found.changed("a")
    assert optimistic(found) == "ab"


def test_without_trials_there_is_never_any() -> None:
    found = Optimism(0)
    found.collapsed("a", USUAL)
    found.changed("b")
    assert (optimistic(found), found.chance) == ("", 0.0)
