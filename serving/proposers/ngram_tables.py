"""An n-gram model for each tenant and cache salt, kept on disk where there is a folder for it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from distillspec.serving.base.owner_files import Owner
from distillspec.serving.proposers.ngram_counts import NgramCounts
from distillspec.serving.proposers.ngram_files import NgramFiles
from distillspec.serving.proposers.tenant_tables import TenantTables

KEEP_S = 30.0  # between two times that all changed tables are written


class NgramTables:
    """Counts by owner. The owners served last keep theirs in memory (`TenantTables`), those that wrote last on disk.

    Args:
        clock: seconds.

    Raises:
        ConfigError: `longest` or `contexts` is below 1.
    """

    def __init__(self, longest: int, contexts: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.longest, self.contexts, self._clock = longest, contexts, clock
        NgramCounts(longest, contexts)  # refuses impossible options now, not with the first request
        self._tables = TenantTables[NgramCounts](self._read)
        self._files: NgramFiles | None = None
        self._changed: dict[Owner, None] = {}  # since they were written, the first one first
        self._keep_s = clock() + KEEP_S  # nothing is written before

    def of(self, owner: Owner) -> NgramCounts:
        """Return an owner's counts, read from the folder at first."""
        return self._tables.of(owner)

    def serve(self, sequences: int) -> None:
        """See `TenantTables.serve`."""
        self._tables.serve(sequences)

    def learn(self, owner: Owner, tokens: Sequence[int], start: int, end: int) -> None:
        """Count the tokens `start` … `end` − 1 of a text."""
        table = self._tables.of(owner)
        for place in range(start, end):
            table.learn(tokens[max(0, place - self.longest) : place], tokens[place])
        if self._files is not None:
            self._changed[owner] = None
            self._keep()

    def keep_in(self, folder: Path, vocabulary: int) -> None:
        """Keep counts in a folder from now on, if there is none yet. Raises RunError if it cannot be made."""
        if self._files is None:
            self._files = NgramFiles(folder, vocabulary, self.longest, self.contexts)

    def flush(self) -> None:
        """Write all that has changed."""
        while self._files is not None and self._changed:
            self._files.flush()
            self._write()
        if self._files is not None:
            self._files.flush()

    def forget(self, tenant: str) -> None:
        """Delete a tenant's counts, in memory and on disk. Raises OSError where a file stays."""
        self._tables.forget(tenant)
        for owner in [owner for owner in self._changed if owner[0] == tenant]:
            del self._changed[owner]
        if self._files is not None:
            self._files.delete(tenant)

    def _keep(self) -> None:
        """Write one table that has changed, now and then. The thread that serves does not wait for the disk."""
        assert self._files is not None
        if self._clock() < self._keep_s or self._files.busy:
            return
        self._write()
        if not self._changed:
            self._keep_s = self._clock() + KEEP_S

    def _write(self) -> None:
        """Write the table that changed first, unless it gave way to others since."""
        assert self._files is not None
        owner = next(iter(self._changed))
        del self._changed[owner]
        if self._tables.holds(owner):
            self._files.write(owner, self._tables.of(owner))

    def _read(self, owner: Owner) -> NgramCounts:
        return NgramCounts(self.longest, self.contexts) if self._files is None else self._files.read(owner)
