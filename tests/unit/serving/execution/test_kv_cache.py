"""Slots have one owner each, texts stay while there is room, and memory stays within the budget."""

from __future__ import annotations

import pytest

from distillspec.serving.execution.kv_cache import Drop, Move, Prefix, SlotPool


def fill(pool: SlotPool, owner: str, text: list[int], salt: str | None = None) -> int:
    """Let `owner` read `text`, from the longest prefix there is. Return its slot."""
    prefix = pool.longest_prefix(text, salt)
    slot = pool.take(owner, len(text), salt, prefix).slot
    done = 0 if prefix is None else prefix.length
    pool.record(slot, text[done:], done)
    pool.check_integrity()
    return slot


def test_nothing_moves_when_an_owner_leaves_and_the_lowest_free_slot_is_taken_next() -> None:
    pool = SlotPool(5, 16)
    for name in "abcd":
        fill(pool, name, [ord(name)] * 4)
    for slot in (2, 0):
        pool.release(slot)
        pool.forget(slot)
    assert pool.owners == {1: "b", 3: "d"}
    assert [fill(pool, name, [ord(name)] * 4) for name in "efg"] == [0, 2, 4]


def test_prefixes_are_found_in_free_slots_too_and_never_in_forgotten_ones() -> None:
    pool = SlotPool(2, 16)
    fill(pool, "a", [1, 2, 3, 4])
    pool.release(0)
    assert pool.longest_prefix([1, 2, 3, 9]) == (0, 3)
    pool.forget(0)
    assert pool.longest_prefix([1, 2, 3, 9]) is None


def test_a_prefix_is_found_by_requests_of_the_same_salt_alone() -> None:
    pool = SlotPool(3, 16)
    for salt, text in (("a", [1, 2, 3, 4]), ("b", [1, 2, 9, 9])):
        fill(pool, salt, text, salt)
    assert pool.longest_prefix([1, 2, 3, 4], "a") == (0, 4)
    assert pool.longest_prefix([1, 2, 3, 4], "b") == (1, 2)
    assert pool.longest_prefix([1, 2, 3, 4], "c") is None
    assert pool.longest_prefix([1, 2, 3, 4]) is None
    pool.release(0)
    pool.forget_salt("a")
    assert pool.longest_prefix([1, 2, 3, 4], "a") is None
    assert pool.longest_prefix([1, 2, 3, 4], "b") == (1, 2)


def test_an_idle_pool_remembers_as_many_texts_as_it_has_slots() -> None:
    pool = SlotPool(3, 16)
    for number, text in enumerate(([1] * 4, [2] * 5, [3] * 6, [4] * 7)):
        slot = fill(pool, "x", text)
        assert slot == number % 3  # the last one overwrites the first text, the oldest
        pool.release(slot)
    assert pool.longest_prefix([1]) is None
    assert pool.longest_prefix([2, 2]) == (1, 2)


def test_a_prefix_is_taken_over_where_it_lies_or_copied_from_longer_texts_and_owners() -> None:
    pool = SlotPool(3, 16)
    pool.release(fill(pool, "a", [1] * 8))
    own = pool.take("b", 9, prefix=Prefix(0, 4))
    assert own == (0, [], [])
    assert pool.contents[0] == [1] * 4
    copied = pool.take("c", 9, prefix=Prefix(0, 4))
    assert copied == (1, [Move(0, 1, 4)], [])
    pool.release(0)
    pool.record(1, [2] * 5, 4)
    pool.release(1)
    assert pool.take("d", 9, prefix=Prefix(1, 4)) == (2, [Move(1, 2, 4)], []), "more than half is another text"
    assert pool.take("e", 9, prefix=Prefix(1, 4)).slot == 0, "another text is overwritten first"
    assert pool.take("f", 9, prefix=Prefix(1, 4)) == (1, [], []), "nothing else is free"


def test_free_texts_give_way_to_owners_the_oldest_first() -> None:
    pool = SlotPool(4, 16, token_budget=20)
    for name in "abc":
        fill(pool, name, [ord(name)] * 6)
    for slot in (1, 0, 2):
        pool.release(slot)
    taken = pool.take("d", 6)
    assert taken == (3, [], [Drop(1)])
    assert (pool.contents[1], pool.held) == ([], [6, 0, 6, 6])
    assert pool.reserve("d", 14) == [Drop(0)]
    assert pool.held == [0, 0, 6, 14]
    assert pool.take("e", 5, prefix=Prefix(2, 4)) == (2, [], [Drop(2, 5)]), "and what an owner does not need"
    pool.check_integrity()


def test_forgotten_texts_give_their_memory_back() -> None:
    pool = SlotPool(2, 16)
    fill(pool, "a", [1] * 4)
    pool.release(fill(pool, "b", [2] * 4))
    assert pool.forget_free() == [Drop(1)]
    assert pool.held == [4, 0]


def test_misuse_of_the_pool_is_found() -> None:
    pool = SlotPool(1, 8)
    pool.take("a", 8)
    with pytest.raises(AssertionError, match="no free slot"):
        pool.take("b", 1)
    with pytest.raises(AssertionError, match="wants 9 tokens"):
        pool.reserve("a", 9)
    with pytest.raises(AssertionError, match="cannot write at 5"):
        pool.record(0, [1], 5)
    pool.owners[1] = "a"
    with pytest.raises(AssertionError, match="owns two slots"):
        pool.check_integrity()
