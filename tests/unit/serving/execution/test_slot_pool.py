"""Slots have one owner each, texts stay while there is room, and memory stays within the budget."""

from __future__ import annotations

import pytest

from distillspec.models.pages import Pages
from distillspec.serving.execution.slot_pool import Drop, Move, Prefix, SlotPool


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
    assert (pool.contents[1], pool.slot_tokens) == ([], [6, 0, 6, 6])
    assert pool.reserve("d", 14) == [Drop(0)]
    assert pool.slot_tokens == [0, 0, 6, 14]
    pool.check_integrity()


def test_an_owner_keeps_what_its_slot_held_until_others_need_it() -> None:
    pool = SlotPool(3, 16, token_budget=20)
    pool.release(fill(pool, "a", [1] * 8))
    assert pool.take("b", 5, prefix=Prefix(0, 4)) == (0, [], [])
    assert (pool.slot_tokens, pool.reserved_tokens) == ([8, 0, 0], 5)
    assert pool.reserve("b", 4) == []
    pool.release(fill(pool, "c", [2] * 10))
    assert pool.take("d", 3) == (2, [], [Drop(0, 4)]), "before a text is forgotten"
    assert pool.contents[1] == [2] * 10
    assert pool.reserve("d", 8) == [Drop(1)]
    assert pool.slot_tokens == [4, 0, 8]
    pool.check_integrity()


def test_forgotten_texts_give_their_memory_back() -> None:
    pool = SlotPool(2, 16)
    fill(pool, "a", [1] * 4)
    pool.release(fill(pool, "b", [2] * 4))
    assert pool.forget_free() == [Drop(1)]
    assert pool.slot_tokens == [4, 0]
    pool.reserve("a", 3)
    assert pool.forget_free() == [Drop(0, 3), Drop(1)], "and what owners' slots held before"
    assert pool.slot_tokens == [3, 0]


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


def paged_pool(slots: int, max_len: int, tokens: int, size: int = 4) -> tuple[SlotPool, Pages]:
    pages = Pages(slots, max_len, tokens // size, size)
    return SlotPool(slots, max_len, tokens, size, pages=pages), pages


def test_a_prefix_shares_its_pages_and_copies_the_last_one() -> None:
    pool, pages = paged_pool(3, 32, 48)
    fill(pool, "a", [*range(11)])
    taken = pool.take("b", 16, None, pool.longest_prefix([*range(10), 99]))
    assert pages.tables[taken.slot][:2] == pages.tables[0][:2]
    assert taken.moves == [Move(pages.tables[0][2], pages.tables[taken.slot][2], 2)]
    pool.check_integrity()
    assert pages.used == 3 + 2


def test_the_page_of_an_owners_newest_token_is_copied() -> None:
    """The owner writes that token once more, as the root of its window."""
    pool, pages = paged_pool(3, 32, 48)
    fill(pool, "a", [*range(12)])
    taken = pool.take("b", 16, None, pool.longest_prefix([*range(12), 99]))
    assert pages.tables[taken.slot][:2] == pages.tables[0][:2]
    assert taken.moves == [Move(pages.tables[0][2], pages.tables[taken.slot][2], 4)]
    pool.release(0)
    again = pool.take("c", 16, None, pool.longest_prefix([*range(12), 98]))
    assert (again.slot, again.moves) == (0, [])
    pool.check_integrity()


def test_free_texts_give_way_page_by_page() -> None:
    pool, pages = paged_pool(4, 32, 40)
    for name, text in (("a", [1] * 20), ("b", [1] * 8 + [2] * 4)):
        pool.release(fill(pool, name, text))
    assert pages.used == 6, "the second one has one page of its own"
    assert sum(pool.slot_tokens) == 32
    pool.take("c", 16)
    assert pages.free == 0
    pool.reserve("c", 20)
    pool.check_integrity()
    assert [len(text) for text in pool.contents[:2]] == [0, 12], "the older text went, and left what is shared"
    assert pages.free == 2


def test_its_own_text_is_taken_over_in_place() -> None:
    pool, pages = paged_pool(2, 32, 32)
    pool.release(fill(pool, "a", [*range(10)]))
    before = list(pages.tables[0])
    taken = pool.take("b", 16, None, pool.longest_prefix([*range(10), 99]))
    assert (taken.slot, taken.moves) == (0, [])
    assert pages.tables[0][:3] == before
    pool.check_integrity()


def test_a_slot_without_a_prefix_gives_back_what_it_shared() -> None:
    """As after a step that raised: no text is known any more, and nobody may write to what another slot reads."""
    pool, pages = paged_pool(2, 16, 32)
    for name in "ab":
        fill(pool, name, [*range(12)])
    assert set(pages.tables[0]) & set(pages.tables[1])
    for slot in range(2):
        pool.release(slot)
        pool.forget(slot)
    for name in "ab":
        pool.take(name, 12)
    pool.check_integrity()
    assert not set(pages.tables[0]) & set(pages.tables[1])


def test_shared_pages_are_reserved_once() -> None:
    pool, pages = paged_pool(4, 32, 48)
    fill(pool, "a", [*range(12)])
    fill(pool, "b", [*range(12), 1, 2])
    assert sum(pool.reserved.values()) - pool.reserved_tokens == 8
    assert pool.shared_tokens(["b", "a"]) == {"a": 8}
    pool.release(0)
    assert pool.reserved_tokens == pool.reserved["b"]
    pool.check_integrity()
    assert pages.shared == 2, "the text of a free slot still is"


def test_a_free_slots_prefix_needs_room_beside_what_is_owned() -> None:
    pool, _ = paged_pool(3, 32, 40)
    pool.release(fill(pool, "a", [*range(12)]))
    fill(pool, "b", [90] * 16)
    prefix = pool.longest_prefix([*range(12), 99])
    assert prefix is not None
    assert pool.has_room(24, prefix)
    assert not pool.has_room(25, prefix)
    assert pool.has_room(25, Prefix(1, 4)), "what is owned takes nothing"
