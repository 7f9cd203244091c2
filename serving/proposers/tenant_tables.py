"""Tables by tenant, of what a proposer has learnt from the tenant's texts. Their number is bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from distillspec.serving.base.owner_files import Owner, first_of_most

OWNERS = 64  # whose tables are kept

Table = TypeVar("Table")


class TenantTables(Generic[Table]):
    """Tables by tenant and cache salt, made when they are first asked for. The owners served last keep theirs.

    Where there are too many, the tenant with the most owners loses the one served longest ago: one that sends a new
    salt with every request displaces its own.

    Args:
        make: returns an owner's table as it starts.
    """

    def __init__(self, make: Callable[[Owner], Table]) -> None:
        self.make, self.most = make, OWNERS
        self._tables: OrderedDict[Owner, Table] = OrderedDict()  # the owner served last at the end

    def of(self, owner: Owner) -> Table:
        """Return the table of an owner."""
        if owner not in self._tables:
            while len(self._tables) >= self.most:
                owners = list(self._tables)
                del self._tables[owners[first_of_most([tenant for tenant, _ in owners])]]
            self._tables[owner] = self.make(owner)
        self._tables.move_to_end(owner)
        return self._tables[owner]

    def holds(self, owner: Owner) -> bool:
        """Return True if an owner has a table now."""
        return owner in self._tables

    def serve(self, sequences: int) -> None:
        """Hold tables for as many owners as may be served at a time: each step asks for all of them."""
        self.most = max(OWNERS, 2 * sequences)

    def forget(self, tenant: str) -> None:
        """Delete a tenant's tables."""
        for owner in [owner for owner in self._tables if owner[0] == tenant]:
            del self._tables[owner]
