"""Slots of the KV cache: their owners, and the text that each slot holds.

Owned slots are always 0 … n−1, so that a decode step reads a contiguous view of the cache. When a sequence leaves,
another is moved into the gap. `SlotPool` decides the moves, and the runners carry them out on their tensors.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """Copy the first `length` positions of `source` to `destination`, and the first `back` ones the other way."""

    source: int
    destination: int
    length: int
    back: int = 0


class Prefix(NamedTuple):
    """A slot that shares its first `length` tokens with a new request."""

    slot: int
    length: int


class SlotPool:
    """Slots of `max_len` tokens, and a budget of tokens over all of them.

    The budget is counted in tokens, whatever the storage: a paged cache would keep this interface.
    `contents[slot]` are the leading tokens whose keys and values the *target's* cache holds there. They stay known
    after their owner has left, until they are overwritten. `salts[slot]` is the salt of that text: only requests with
    an equal one may reuse its prefix.
    """

    def __init__(self, slots: int, max_len: int, token_budget: int | None = None) -> None:
        self.slots = slots
        self.max_len = max_len
        self.token_budget = slots * max_len if token_budget is None else token_budget
        self.owners: list[str] = []  # slot → sequence id
        self.reserved: dict[str, int] = {}  # sequence id → tokens it may grow to
        self.contents: list[list[int]] = [[] for _ in range(slots)]
        self.salts: list[Hashable] = [None] * slots
        self._used = [0] * slots  # when each slot was last taken, released, or copied from
        self._now = 0

    @property
    def free_slots(self) -> int:
        """Slots without an owner."""
        return self.slots - len(self.owners)

    @property
    def reserved_tokens(self) -> int:
        """Tokens reserved for all owners together."""
        return sum(self.reserved.values())

    def take(self, owner: str, tokens: int, salt: Hashable = None) -> int:
        """Give `owner` the next free slot, with room for `tokens` and text of `salt`. Return the slot."""
        assert self.free_slots > 0, "no free slot"
        assert owner not in self.reserved, f"{owner} owns a slot already"
        slot = len(self.owners)
        self.owners.append(owner)
        self.reserved[owner] = 0
        self.contents[slot], self.salts[slot] = [], salt
        self._touch(slot)
        self.reserve(owner, tokens)
        return slot

    def bring(self, prefix: Prefix | None) -> list[Move]:
        """Return the moves that put `prefix` into the next free slot and overwrite the least recently used text.

        Owned slots are the first ones, so without this an idle engine would write every prompt into slot 0 and
        remember only the last. A free slot changes places if the prefix is at least half of its text. Longer texts
        are copied from.
        """
        following = len(self.owners)
        if prefix is not None:
            self._touch(prefix.slot)
        if prefix is not None and prefix.slot >= following and 2 * prefix.length >= len(self.contents[prefix.slot]):
            return [] if prefix.slot == following else [self._exchange(prefix.slot, following)]
        source = following if prefix is None else prefix.slot
        free = [slot for slot in range(following, self.slots) if slot == following or slot != source]
        oldest = min(free, key=self._used.__getitem__)
        saved = oldest != following and bool(self.contents[following])
        moves = [self._move(following, oldest)] if saved else []
        if prefix is not None and source != following:
            moves.append(Move(source, following, prefix.length))
        return moves

    def reserve(self, owner: str, tokens: int) -> None:
        """Reserve room for `tokens` in all."""
        assert tokens <= self.max_len, f"{owner} wants {tokens} tokens in a slot of {self.max_len}"
        self.reserved[owner] = tokens

    def record(self, slot: int, tokens: Sequence[int], start: int) -> None:
        """Record that the target has read `tokens` into `slot` from position `start` on."""
        held = self.contents[slot]
        assert start <= len(held), f"slot {slot} holds {len(held)} tokens, cannot write at {start}"
        held[start:] = tokens

    def release(self, slot: int, first_prefilling: int) -> list[Move]:
        """Free `slot`. Return the moves that keep owned slots contiguous, decoding ones first.

        Args:
            slot: an owned one.
            first_prefilling: the first slot of the prefilling sequences (the number of decoding ones if none).
        """
        del self.reserved[self.owners[slot]]
        moves, gap = [], slot
        for last in (first_prefilling - 1, len(self.owners) - 1):
            if gap < last:
                moves.append(self._move(last, gap))
                self.owners[gap] = self.owners[last]
                gap = last
        del self.owners[-1]
        if moves:
            self.contents[gap] = []  # its text moved with its owner
        else:
            self._touch(gap)
        return moves

    def longest_prefix(self, tokens: Sequence[int], salt: Hashable = None) -> Prefix | None:
        """Return the slot of this salt, owned or not, that shares the longest prefix with `tokens`."""
        pairs = zip(self.contents, self.salts, strict=True)
        lengths = [_common(held, tokens) if whose == salt else 0 for held, whose in pairs]
        length = max(lengths, default=0)
        return Prefix(lengths.index(length), length) if length else None

    def forget(self, slot: int) -> None:
        """Forget the slot's text, so that none of it is reused."""
        self.contents[slot] = []

    def forget_free(self) -> None:
        """Forget the texts of all free slots, so that no prefix of theirs is reused."""
        for slot in range(len(self.owners), self.slots):
            self.forget(slot)

    def _move(self, source: int, destination: int) -> Move:
        self.contents[destination], self.salts[destination] = list(self.contents[source]), self.salts[source]
        self._used[destination] = self._used[source]
        return Move(source, destination, len(self.contents[source]))

    def _exchange(self, one: int, other: int) -> Move:
        lengths = len(self.contents[one]), len(self.contents[other])
        self.contents[one], self.contents[other] = self.contents[other], self.contents[one]
        self.salts[one], self.salts[other] = self.salts[other], self.salts[one]
        self._used[one], self._used[other] = self._used[other], self._used[one]
        return Move(one, other, *lengths)

    def _touch(self, slot: int) -> None:
        self._now += 1
        self._used[slot] = self._now

    def check_integrity(self) -> None:
        """Raise AssertionError if a slot has two owners, a reservation no slot, or the budget is broken."""
        assert len(set(self.owners)) == len(self.owners), f"a sequence owns two slots: {self.owners}"
        assert set(self.owners) == set(self.reserved), "reservations and owners differ"
        assert len(self.owners) <= self.slots, "more owners than slots"
        assert all(0 < tokens <= self.max_len for tokens in self.reserved.values()), "a reservation exceeds its slot"
        assert self.reserved_tokens <= self.token_budget, "more tokens reserved than the budget allows"
        assert all(len(held) <= self.max_len for held in self.contents), "a slot holds more than fits"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Count equal leading tokens, by bisection: comparing slices is much faster than a loop."""
    agree, end = 0, min(len(one), len(other))
    while agree < end:
        middle = (agree + end + 1) // 2
        if one[agree:middle] == other[agree:middle]:
            agree = middle
        else:
            end = middle - 1
    return agree
