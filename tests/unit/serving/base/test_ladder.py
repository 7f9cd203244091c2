"""Ladders: small steps, the same ones whatever their end, and numbers beyond that stay."""

from __future__ import annotations

import numpy
import pytest

from distillspec.serving.base.ladder import EXACT, UNRECORDED, Ladder, Recorded


@pytest.mark.parametrize("most", [1, 5, 8, 9, 80, 1000, 1280])
def test_numbers_of_tokens_are_padded_by_a_quarter_at_most(most: int) -> None:
    ladder = Ladder.tokens(most)
    assert ladder.last >= most > ([0, *ladder.steps])[-2]
    for tokens in range(1, most + 1):
        assert tokens <= ladder.up(tokens) <= 1.25 * tokens
    assert Ladder.tokens(8).steps == tuple(range(1, 9))


def test_a_longer_ladder_has_the_same_steps() -> None:
    short, long = Ladder.tokens(33), Ladder.tokens(4000)
    assert long.steps[: len(short.steps)] == short.steps
    assert len(long.steps) < 50, "few enough to record"


def test_numbers_beyond_the_ladder_stay() -> None:
    ladder = Ladder((1, 4, 9))
    assert [ladder.up(number) for number in (0, 1, 2, 4, 5, 9, 10, 500)] == [0, 1, 4, 4, 9, 9, 10, 500]
    assert [EXACT.up(number) for number in (0, 3, 2.5)] == [0, 3, 2.5]
    assert (EXACT.last, Ladder.tokens(0)) == (0, EXACT)


@pytest.mark.parametrize("ladder", [EXACT, Ladder((2,)), Ladder.tokens(20)])
def test_many_numbers_at_once_are_as_one_by_one(ladder: Ladder) -> None:
    numbers = numpy.array([[0.0, 1, 2, 2.5, 3], [9, 11, 20, 20.5, 300]])
    assert ladder.all_up(numbers).ravel().tolist() == [ladder.up(float(number)) for number in numbers.ravel()]


def test_doubling_ends_where_it_is_told_to() -> None:
    assert Ladder.doubling(12).steps == (1, 2, 4, 8, 12)
    assert Ladder.doubling(8).steps == (1, 2, 4, 8)
    assert Ladder.doubling(9000, 1024, 4).steps == (1024, 4096, 9000)
    assert Ladder.doubling(256, 256).steps == (256,)


def test_an_engine_needs_windows_in_the_target_and_rows_in_drafts() -> None:
    recorded = Recorded.of(slots=16, speculation_length=4)
    assert (recorded.target.last, recorded.drafts.last) == (80, 16)
    assert UNRECORDED == (EXACT, EXACT)
