"""Tables by tenant, of what a proposer has learnt from the tenant's texts. Their number is bounded."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from distillspec.serving.base.requests import SequenceState
from distillspec.serving.proposers.answer_files import Owner

OWNERS = 64  # whose tables are kept

Table = TypeVar("Table")


class TenantTables(Generic[Table]):
    """Tables by tenant and cache salt, made when they are first asked for. The owners served last keep theirs.

    Args:
        make: returns an empty table.
    """

    def __init__(self, make: Callable[[], Table]) -> None:
        self.make = make
        self._tables: OrderedDict[Owner, Table] = OrderedDict()  # the owner served last at the end

    def of(self, sequence: SequenceState) -> Table:
        """Return the table of a sequence's owner."""
        owner = sequence.request.cache_key
        if owner not in self._tables:
            self._tables[owner] = self.make()
            if len(self._tables) > OWNERS:
                self._tables.popitem(last=False)
        self._tables.move_to_end(owner)
        return self._tables[owner]

    def forget(self, tenant: str) -> None:
        """Delete a tenant's tables."""
        for owner in [owner for owner in self._tables if owner[0] == tenant]:
            del self._tables[owner]
