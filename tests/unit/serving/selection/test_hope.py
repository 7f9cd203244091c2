"""Hope for other drafts after a collapse: for a bounded number of tokens and answers."""

from __future__ import annotations

from distillspec.serving.selection.hope import ENOUGH, LASTING, Hope

EXPECTED = 0.1


def hoping() -> Hope:
    found = Hope()
    found.begin("a", 0.7)
    return found


def test_without_a_collapse_nothing_is_hoped_for() -> None:
    found = Hope()
    found.saw("b", 3)
    found.begun()
    assert not found.holds
    assert found.of("b", EXPECTED) == EXPECTED


def test_all_but_the_one_that_collapsed_are_hoped_to_be_as_good() -> None:
    found = hoping()
    assert found.holds
    assert [found.of(source, EXPECTED) for source in "abc"] == [EXPECTED, 0.7, 0.7]
    assert found.of("b", 0.9) == 0.9


def test_enough_tokens_end_it_for_one_draft() -> None:
    found = hoping()
    found.saw("b", ENOUGH - 1)
    assert found.of("b", EXPECTED) == 0.7
    found.saw("b", 1)
    assert [found.of(source, EXPECTED) for source in "bc"] == [EXPECTED, 0.7]
    found.forget("b")
    assert found.of("b", EXPECTED) == 0.7, "it is another draft now"


def test_answers_end_it_for_all() -> None:
    found = hoping()
    for _ in range(LASTING):
        assert found.holds
        found.begun()
    assert not found.holds
    assert found.of("b", EXPECTED) == EXPECTED


def test_a_second_collapse_does_not_let_drafts_be_tried_twice() -> None:
    found = hoping()
    found.saw("b", ENOUGH)
    found.begin("b", 0.6)
    assert [found.of(source, EXPECTED) for source in "abc"] == [EXPECTED, EXPECTED, 0.6]


def test_a_later_one_lets_all_others_be_tried() -> None:
    found = hoping()
    found.saw("b", ENOUGH)
    for _ in range(LASTING):
        found.begun()
    found.begin("b", 0.6)
    assert [found.of(source, EXPECTED) for source in "abc"] == [0.6, EXPECTED, 0.6]
