"""Slots of the KV cache: their owners, the text that each slot holds, and the memory that it takes.

A sequence keeps its slot until it leaves, and nothing is moved then. Its text stays for prompts that begin alike, as
long as no owner needs the memory. `SlotPool` decides, and the caches follow.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from distillspec.models.pages import Pages

PROBE = 16  # leading tokens of two texts that are compared first


class Move(NamedTuple):
    """Copy the first `length` places of row `source` of the caches to row `destination`. Rows are slots, or pages."""

    source: int
    destination: int
    length: int


class Drop(NamedTuple):
    """Give back the memory of a slot's places from `start` on."""

    slot: int
    start: int = 0


class Prefix(NamedTuple):
    """A slot that shares its first `length` tokens with a new request."""

    slot: int
    length: int


class Taken(NamedTuple):
    """A slot for a new owner: first carry out `moves`, then `drops`."""

    slot: int
    moves: list[Move]
    drops: list[Drop]


class SlotPool:
    """Slots of `max_len` tokens, and a budget of tokens over all of them.

    There may be more slots than the budget fills: a slot takes memory for the tokens that it holds, not for `max_len`.
    What owners reserve comes first. In what is left free slots keep their text, the most recently used ones, and owners
    what their slots held before: giving memory back, and taking it again, takes milliseconds.

    Args:
        block: memory is taken by so many tokens at a time, and reservations are rounded up to that.
        pages: memory of the slots, where they share it in pages. There are enough for the budget.

    Attributes:
        near: few owners get slots below this number, if one is free. Recorded passes read all rows up to the last slot.
        owners: slot → sequence id.
        reserved: sequence id → tokens it may grow to.
        contents: slot → the leading tokens whose keys and values the *target's* cache holds there.
        salts: slot → the salt of its text. Only requests with an equal one may reuse its prefix.
        slot_tokens: slot → tokens that it has memory for: at least those reserved, or once reserved by its last owner.
    """

    def __init__(
        self,
        slots: int,
        max_len: int,
        token_budget: int | None = None,
        block: int = 1,
        near: int | None = None,
        pages: Pages | None = None,
    ) -> None:
        self.slots, self.max_len = slots, max_len
        self.block, self.pages = block, pages
        self.near = slots if near is None else near
        self.token_budget = slots * max_len if token_budget is None else token_budget
        self.owners: dict[int, str] = {}
        self.reserved: dict[str, int] = {}
        self.contents: list[list[int]] = [[] for _ in range(slots)]
        self.salts: list[Hashable] = [None] * slots
        self.slot_tokens = [0] * slots
        self.held_tokens = 0  # of all slots together
        self._slot_of: dict[str, int] = {}
        self._used, self._now = [0] * slots, 0  # when each slot was last taken, released, or copied from

    @property
    def free_slots(self) -> int:
        """Slots without an owner."""
        return self.slots - len(self.owners)

    @property
    def reserved_tokens(self) -> int:
        """Tokens reserved for all owners together. Shared pages count once."""
        return sum(self.reserved.values()) - sum(self.shared_tokens(list(self._slot_of)).values())

    @property
    def shares_pages(self) -> bool:
        """True if several slots hold the same page."""
        return self.pages is not None and self.pages.shared > 0

    def shared_tokens(self, owners: Sequence[str]) -> dict[str, int]:
        """Return how many tokens of each owner's pages an earlier one of `owners` holds too. Zeros are left out."""
        if self.pages is None or not self.shares_pages:
            return {}
        counts = self.pages.held_before([self._slot_of[owner] for owner in owners])
        return {owner: self.pages.size * count for owner, count in zip(owners, counts, strict=True) if count}

    def has_room(self, tokens: int, prefix: Prefix) -> bool:
        """Return True if a new owner of `tokens` fits beside the others when it uses the pages of `prefix`."""
        if self.pages is None or prefix.slot in self.owners:
            return True
        whole = self.pages.tables[prefix.slot][: prefix.length // self.pages.size]
        kept = {*whole, *(page for slot in self.owners for page in self.pages.tables[slot])}
        return self.pages.needed(tokens) - len(whole) <= self.pages.count - len(kept)

    def take(self, owner: str, tokens: int, salt: Hashable = None, prefix: Prefix | None = None) -> Taken:
        """Give `owner` a slot with room for `tokens` and text of `salt`, which begins with `prefix`."""
        assert self.free_slots > 0, "no free slot"
        assert owner not in self.reserved, f"{owner} owns a slot already"
        slot = self._choose(prefix)
        if prefix is not None:
            self._touch(prefix.slot)
        self._touch(slot)
        rest = self._share(slot, prefix)
        shared = [] if prefix is None else self.contents[prefix.slot][: prefix.length]
        self.contents[slot], self.salts[slot] = shared, salt
        self.owners[slot], self._slot_of[owner] = owner, slot
        drops = self.reserve(owner, tokens)
        if prefix is not None and self.pages is not None:
            return Taken(slot, [Move(*copy) for copy in self.pages.copies(slot, rest, prefix.length)], drops)
        moved = prefix is not None and prefix.slot != slot
        return Taken(slot, [Move(prefix.slot, slot, prefix.length)] if prefix is not None and moved else [], drops)

    def _share(self, slot: int, prefix: Prefix | None) -> list[int]:
        """Share the prefix's pages with the slot, in place of its own. Return the pages that have to be copied."""
        if self.pages is None:
            return []
        if prefix is None:
            self.pages.resize(slot, 0)
            return []
        text = len(self.contents[prefix.slot])
        readable = text - 1 if prefix.slot in self.owners else text  # its newest token will be read once more
        return self.pages.share(slot, prefix.slot, prefix.length, readable)

    def _choose(self, prefix: Prefix | None) -> int:
        """Return the prefix's own slot if it is free and the prefix is at least half of its text: nothing is copied.

        Else return the first slot without text, or the one whose text was used the longest time ago.
        """
        free = [slot for slot in range(self.slots) if slot not in self.owners]
        if prefix is not None and prefix.slot in free:
            if len(free) == 1 or 2 * prefix.length >= len(self.contents[prefix.slot]):
                return prefix.slot
            free.remove(prefix.slot)
        near = [slot for slot in free if slot < max(self.near, 2 * len(self.owners))]
        return min(near or free, key=self._last_use)

    def _last_use(self, slot: int) -> int:
        """Return when the slot's text was used last, 0 without text."""
        return self._used[slot] if self.contents[slot] else 0

    def reserve(self, owner: str, tokens: int) -> list[Drop]:
        """Reserve room for `tokens` in all. Return the memory that others have to give back for it."""
        assert tokens <= self.max_len, f"{owner} wants {tokens} tokens in a slot of {self.max_len}"
        slot, drops = self._slot_of[owner], list[Drop]()
        self.reserved[owner] = tokens
        wanted = tokens if self.pages is not None else max(tokens, self.slot_tokens[slot])
        while self._lacks(slot, wanted):
            given = self._given_back()
            if given is None:
                break
            drops.append(given)
        self._hold(slot, wanted)
        return drops

    def _given_back(self) -> Drop | None:
        """Give back what an owner holds beyond its reservation, else the text of a free slot, the oldest first."""
        spare = self._spare()
        if spare:
            return self._trimmed(spare[0])
        free = [slot for slot in range(self.slots) if self.slot_tokens[slot] and slot not in self.owners]
        return self._drop(min(free, key=self._last_use)) if free else None

    def _spare(self) -> list[int]:
        """Return the slots whose owners hold more than they have reserved."""
        return [slot for slot, owner in self.owners.items() if self.slot_tokens[slot] > self.reserved[owner]]

    def _trimmed(self, slot: int) -> Drop:
        """Give back what an owner holds beyond its reservation."""
        tokens = self.reserved[self.owners[slot]]
        self._hold(slot, tokens)
        return Drop(slot, tokens)

    def _lacks(self, slot: int, tokens: int) -> bool:
        """Return True if there is no room for a slot to hold `tokens`."""
        if self.pages is not None:
            return self.pages.lacks(slot, tokens)
        return self.held_tokens - self.slot_tokens[slot] + tokens > self.token_budget

    def record(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Record that the target has read `tokens` into `slot` from position `start` on."""
        text = self.contents[slot]
        assert start <= len(text), f"slot {slot} holds {len(text)} tokens, cannot write at {start}"
        text[start:] = tokens

    def release(self, slot: int) -> None:
        """Free `slot`. Its text stays."""
        owner = self.owners.pop(slot)
        del self._slot_of[owner]
        self.reserved.pop(owner, None)  # taking it may have failed
        self._touch(slot)

    def longest_prefix(
        self, tokens: Sequence[int], salt: Hashable = None, slots: Iterable[int] | None = None
    ) -> Prefix | None:
        """Return the slot of this salt that shares the longest prefix with `tokens`. Free ones first.

        Args:
            slots: look at these only. None: at all of them, owned or not.
        """
        best = Prefix(0, 0)
        for slot in range(self.slots) if slots is None else slots:
            text, probe = self.contents[slot], min(best.length, PROBE)
            wanted = best.length + (slot in self.owners or best.slot not in self.owners)  # a free slot wins a tie
            if self.salts[slot] != salt or min(len(text), len(tokens)) < wanted or text[:probe] != tokens[:probe]:
                continue
            length = common_length(text, tokens)
            if length >= wanted:
                best = Prefix(slot, length)
        return best if best.length else None

    def forget(self, slot: int) -> None:
        """Forget the slot's text, so that none of it is reused."""
        self.contents[slot] = []

    def forget_free(self) -> list[Drop]:
        """Forget the texts of all free slots. Return their memory, and what owners do not need, to be given back."""
        spare = list(map(self._trimmed, self._spare()))
        return spare + [self._drop(slot) for slot in range(self.slots) if slot not in self.owners]

    def forget_salt(self, salt: Hashable) -> None:
        """Forget the texts of free slots with this salt."""
        for slot in range(self.slots):
            if slot not in self.owners and self.salts[slot] == salt:
                self.forget(slot)

    def _drop(self, slot: int) -> Drop:
        self.forget(slot)
        self._hold(slot, 0)
        return Drop(slot)

    def _hold(self, slot: int, tokens: int) -> None:
        self.held_tokens += tokens - self.slot_tokens[slot]
        self.slot_tokens[slot] = tokens
        if self.pages is not None:
            self.pages.resize(slot, tokens)

    def _touch(self, slot: int) -> None:
        self._now += 1
        self._used[slot] = self._now

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot has two owners, a reservation no slot, or the budget is broken."""
        owned = {owner: slot for slot, owner in self.owners.items()}
        assert len(owned) == len(self.owners), f"a sequence owns two slots: {self.owners}"
        assert owned.keys() == self.reserved.keys(), "reservations and owners differ"
        assert self.owners.keys() <= set(range(self.slots)), "an owned slot does not exist"
        assert all(0 < tokens <= self.max_len for tokens in self.reserved.values()), "a reservation exceeds its slot"
        assert all(self.slot_tokens[slot] >= self.reserved[owner] for owner, slot in owned.items()), (
            "less memory is held than reserved"
        )
        assert sum(self.slot_tokens) == self.held_tokens, "the held tokens are miscounted"
        if self.pages is None:
            assert self.held_tokens <= self.token_budget, "more tokens held than the budget allows"
        else:
            self.pages.check_integrity()
            assert not self._spare(), "an owner holds more pages than it has reserved"
            needed = [self.pages.needed(tokens) for tokens in self.slot_tokens]
            assert [len(table) for table in self.pages.tables] == needed, "slots have other pages than they hold tokens"
        assert self.reserved_tokens <= self.token_budget, "more tokens reserved than the budget allows"
        assert all(len(text) <= self.max_len for text in self.contents), "a slot holds more than fits"
        texts = zip(self.contents, self.slot_tokens, strict=True)
        assert all(len(text) <= tokens for text, tokens in texts), "a text has less memory than it takes"


def common_length(text: Sequence[int], other: Sequence[int]) -> int:
    """Count equal leading tokens, by bisection: comparing slices is much faster than a loop. Most texts part early."""
    agree, end = 0, min(len(text), len(other))
    if text[:PROBE] != other[:PROBE]:
        end = min(end, PROBE)
    while agree < end:
        middle = (agree + end + 1) // 2
        if text[agree:middle] == other[agree:middle]:
            agree = middle
        else:
            end = middle - 1
    return agree
