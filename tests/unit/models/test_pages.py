"""Pages are held once, shared where nobody writes, and waste little."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillspec.models.pages import PageCopy, Pages

SIZE = 16


def test_a_slot_grows_and_shrinks_page_by_page() -> None:
    pages = Pages(2, 100, 8, SIZE)
    pages.resize(0, 1)
    pages.resize(1, 33)
    pages.resize(0, 17)
    assert [len(table) for table in pages.tables] == [2, 3]
    assert pages.used == 5
    assert pages.lacks(0, 81)
    assert not pages.lacks(0, 80)
    pages.resize(1, 16)
    assert not pages.lacks(0, 81)
    pages.check_integrity()


def test_the_device_is_told_what_changed() -> None:
    pages = Pages(2, 100, 8, SIZE)
    pages.resize(1, 33)
    assert pages.columns == 7
    assert pages.changes == {7 + column: page for column, page in enumerate(pages.tables[1])}
    pages.changes.clear()
    pages.resize(1, 17)
    assert pages.changes == {9: 0}


def test_whole_pages_are_shared_and_the_rest_is_copied() -> None:
    pages = Pages(3, 100, 20, SIZE)
    pages.resize(0, 50)
    before = pages.used
    rest = pages.share(1, 0, 40, readable=50)
    pages.resize(1, 60)
    assert pages.tables[1][:2] == pages.tables[0][:2]
    assert pages.copies(1, rest, 40) == [PageCopy(pages.tables[0][2], pages.tables[1][2], 8)]
    assert pages.used == before + 2
    pages.resize(0, 0)
    pages.check_integrity()
    assert pages.used == 4


def test_a_page_that_its_owner_writes_again_is_copied() -> None:
    pages = Pages(2, 100, 20, SIZE)
    pages.resize(0, 48)
    rest = pages.share(1, 0, 32, readable=31)
    pages.resize(1, 48)
    assert pages.tables[1][0] == pages.tables[0][0]
    assert pages.copies(1, rest, 32) == [PageCopy(pages.tables[0][1], pages.tables[1][1], 16)]
    pages.check_integrity()


def test_a_slot_that_goes_on_behind_its_own_prefix_copies_only_what_others_read() -> None:
    pages = Pages(2, 100, 20, SIZE)
    pages.resize(0, 48)
    own = list(pages.tables[0])
    rest = pages.share(0, 0, 40, readable=48)
    pages.resize(0, 48)
    assert pages.copies(0, rest, 40) == []
    assert pages.tables[0] == own
    pages.share(1, 0, 48, readable=48)  # another slot holds all three
    rest = pages.share(0, 0, 40, readable=48)
    pages.resize(0, 48)
    assert pages.tables[0][:2] == own[:2]
    assert pages.copies(0, rest, 40) == [PageCopy(own[2], pages.tables[0][2], 8)]
    assert pages.tables[1] == own
    pages.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 70), st.booleans()), max_size=40))
def test_nobody_writes_to_what_others_hold(steps: list[tuple[int, int, int, bool]]) -> None:
    """Random growth and sharing: all slots find their own text in their pages, whatever was written since."""
    pages = Pages(4, 70, 40, 4)
    texts: list[list[float]] = [[] for _ in range(4)]
    held: dict[tuple[int, int], float] = {}  # (page, offset) → token
    chance = random.Random(0)
    for slot, source, length, shares in steps:
        if shares:
            prefix = texts[source][:length]
            rest = pages.share(slot, source, len(prefix), len(texts[source]))
            pages.resize(slot, min(70, len(prefix) + 5))
            for move in pages.copies(slot, rest, len(prefix)):
                for place in range(move.length):
                    held[move.destination, place] = held[move.source, place]
            texts[slot] = list(prefix)
        elif length > len(texts[slot]) and not pages.lacks(slot, length):
            pages.resize(slot, length)
        while len(texts[slot]) < min(70, len(pages.tables[slot]) * 4):
            token = chance.random()
            page = pages.tables[slot][len(texts[slot]) // 4]
            held[page, len(texts[slot]) % 4] = token
            texts[slot].append(token)
        for own, table in zip(texts, pages.tables, strict=True):
            assert [held[table[place // 4], place % 4] for place in range(len(own))] == own
        pages.check_integrity()


@pytest.mark.parametrize("lengths", [[300] * 64, range(50, 2001, 30)], ids=["chats", "50 to 2,000"])
def test_at_most_a_quarter_is_wasted(lengths: Sequence[int]) -> None:
    """The arithmetic of blocks of 16: the last page of a text is the only one that is not full."""
    pages = Pages(len(lengths), 4096, sum(-(-length // SIZE) for length in lengths), SIZE)
    for slot, length in enumerate(lengths):
        for grown in range(1, length + 1, 7):
            pages.resize(slot, grown)
        pages.resize(slot, length)
    assert pages.free == 0
    assert 1 - sum(lengths) / (pages.used * SIZE) <= 0.25
    assert pages.used * SIZE - sum(lengths) < SIZE * len(lengths)


def test_pages_that_an_earlier_slot_holds_are_counted() -> None:
    pages = Pages(4, 100, 30, SIZE)
    pages.resize(0, 64)
    for slot, length in ((1, 32), (2, 48)):
        pages.share(slot, 0, length, readable=64)
        pages.resize(slot, 64)
    pages.resize(3, 64)
    assert (pages.held_before([0, 1, 2, 3]), pages.shared) == ([0, 2, 3, 0], 3)
    assert pages.held_before([3, 1, 2]) == [0, 0, 2]
    pages.resize(0, 0)
    assert (pages.held_before([2, 1]), pages.shared) == ([0, 2], 2)
    pages.resize(1, 16)
    pages.check_integrity()
    assert [pages.surely_whole(length) for length in (0, 16, 17, 33)] == [0, 0, 16, 32]
