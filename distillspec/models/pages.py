"""Pages of a cache's memory, and which of them each slot holds: a decision of the host alone.

Slots may share the pages of a text that they begin with. Nobody writes to a page that others hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple


class PageCopy(NamedTuple):
    """Copy the first `length` places of page `source` to page `destination`."""

    source: int
    destination: int
    length: int


class Pages:
    """Pages 1 … `count` of `size` tokens each. Page 0 takes what is written without a place, and is never read.

    Attributes:
        columns: pages that a slot's row of the block table names, one for the spare place among them.
        tables: slot → its pages, in the order of its text.
        shared: pages that several slots hold.
        changes: entry of the block table (slot · columns + column) → page, where the device's table is behind.
    """

    def __init__(self, slots: int, max_len: int, count: int, size: int) -> None:
        self.count = count
        self.size = size
        self.columns = max_len // size + 1
        self.tables: list[list[int]] = [[] for _ in range(slots)]
        self.changes: dict[int, int] = {}
        self._followers: list[dict[int, int]] = []  # changes of further tables
        self.shared = 0
        self._users = [0] * (1 + count)
        self._free = list(range(count, 0, -1))

    def follow(self) -> dict[int, int]:
        """Return the changes of one more table, which is empty yet. They grow as `changes` do, until it leaves."""
        entries = [(slot, column, page) for slot, table in enumerate(self.tables) for column, page in enumerate(table)]
        self._followers.append({slot * self.columns + column: page for slot, column, page in entries})
        return self._followers[-1]

    def leave(self, changes: dict[int, int]) -> None:
        """Forget a table that is no longer used. More calls do nothing."""
        self._followers = [follower for follower in self._followers if follower is not changes]

    @property
    def free(self) -> int:
        """Pages that no slot holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that slots hold. Shared ones count once."""
        return self.count - self.free

    def needed(self, tokens: int) -> int:
        """Return the pages of so many tokens."""
        return -(-tokens // self.size)

    def lacks(self, slot: int, tokens: int) -> bool:
        """Return True if there are not enough free pages for a slot to hold `tokens`."""
        return self.needed(tokens) - len(self.tables[slot]) > self.free

    def resize(self, slot: int, tokens: int) -> None:
        """Hold pages for `tokens`, no more and no fewer. There must be enough."""
        assert not self.lacks(slot, tokens), f"{self.free} pages are left, too few for {tokens} tokens of slot {slot}"
        table, wanted = self.tables[slot], self.needed(tokens)
        while len(table) > wanted:
            self._name(slot, len(table) - 1, 0)
            self._leave(table.pop())
        while len(table) < wanted:
            page = self._free.pop()
            self._users[page] = 1
            self._name(slot, len(table), page)
            table.append(page)

    def share(self, slot: int, source: int, length: int, readable: int) -> list[int]:
        """Hold the whole pages of the first `length` tokens of `source`, in place of the slot's own pages.

        Args:
            length: tokens of the prefix.
            readable: tokens of the source that it never writes again.

        Returns:
            The source's pages with the rest of the prefix, to be copied (`copies`) when the slot has been resized.
        """
        first = min(length, readable) // self.size
        old, end = list(self.tables[source]), self.needed(length)
        rest = old[first:end]
        kept = old[:first] + ([page for page in rest if self._users[page] == 1] if slot == source else [])
        for page in kept:
            self._join(page)
        self.resize(slot, 0)
        for column, page in enumerate(kept):
            self._name(slot, column, page)
        self.tables[slot] = kept
        return rest

    def surely_whole(self, length: int) -> int:
        """Return how many tokens of a prefix of `length` are surely shared: the source may write its newest token."""
        return max(0, length - 1) // self.size * self.size

    def held_before(self, slots: Sequence[int]) -> list[int]:
        """Return for each slot how many of its pages an earlier one of `slots` holds too.

        Slots share what they begin with, so that a page with one user ends the search.
        """
        seen: set[int] = set()
        counts = []
        for slot in slots:
            begin = list(takewhile(lambda page: self._users[page] > 1, self.tables[slot]))
            counts.append(len(seen.intersection(begin)))
            seen.update(begin)
        return counts

    def copies(self, slot: int, rest: list[int], length: int) -> list[PageCopy]:
        """Return what to copy into the slot's own pages: the `rest` of a prefix of `length` tokens."""
        first = self.needed(length) - len(rest)
        new = self.tables[slot][first : first + len(rest)]
        return [
            PageCopy(page, own_page, min(self.size, length - (first + index) * self.size))
            for index, (page, own_page) in enumerate(zip(rest, new, strict=True))
            if page != own_page
        ]

    def places(self, texts: Mapping[int, int]) -> dict[int, int]:
        """Return the pages of some slots' first tokens, slot → tokens, and how many places of each they take."""
        taken: dict[int, int] = {}
        for slot, tokens in texts.items():
            for column, page in enumerate(self.tables[slot][: self.needed(tokens)]):
                taken[page] = max(taken.get(page, 0), min(self.size, tokens - column * self.size))
        return taken

    def check_integrity(self) -> None:
        """Raise AssertionError where pages, their users and the free ones disagree."""
        listed = [page for table in self.tables for page in table]
        assert all(listed.count(page) == self._users[page] for page in range(1, 1 + self.count)), "users are miscounted"
        assert self.shared == sum(users > 1 for users in self._users), "shared pages are miscounted"
        assert 0 not in listed, "a slot holds the spare page"
        free = [page for page in range(1, 1 + self.count) if not self._users[page]]
        assert sorted(self._free) == free, "a free page is held, or a page is lost"
        assert all(len(table) == len(set(table)) <= self.columns for table in self.tables), "a slot holds a page twice"

    def _name(self, slot: int, column: int, page: int) -> None:
        for changes in (self.changes, *self._followers):
            changes[slot * self.columns + column] = page

    def _join(self, page: int) -> None:
        self._users[page] += 1
        self.shared += self._users[page] == 2

    def _leave(self, page: int) -> None:
        self._users[page] -= 1
        self.shared -= self._users[page] == 1
        if not self._users[page]:
            self._free.append(page)
