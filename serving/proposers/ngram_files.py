"""Counts of n-grams on disk, so that they survive restarts."""

from __future__ import annotations

import json
import logging
import sys
import threading
import zlib
from pathlib import Path
from typing import Any

from distillspec.files import write_private
from distillspec.serving.base.owner_files import Owner, OwnerFiles, delete_files
from distillspec.serving.proposers.ngram_counts import NgramCounts

log = logging.getLogger(__name__)

ENDING = ".ngrams"
FILES = 64  # the most that are kept, of 32 bytes a context before they are compressed
LEVEL = 1  # of compression: most of a table is zeros


class NgramFiles:
    """A file for each owner's counts: a line of JSON that says what they are, and the table, compressed by zlib.

    One thread calls it, and never waits for the disk but in `delete` and `flush`: a second one compresses and writes.
    A file is whole or not there. One that is damaged, or of other options, is not read, and the next write replaces it.

    Args:
        longest, contexts: of the tables.
        vocabulary: ids are below it.

    Raises:
        RunError: the folder cannot be made.
    """

    def __init__(self, folder: Path, vocabulary: int, longest: int, contexts: int) -> None:
        self._files = OwnerFiles(folder, vocabulary, ENDING)
        self._longest, self._contexts = longest, contexts
        self._disk = threading.Lock()  # held while files change
        self._writing: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        """True while the last table is being written."""
        return self._writing is not None and self._writing.is_alive()

    def read(self, owner: Owner) -> NgramCounts:
        """Return an owner's counts, empty ones where there is no file that fits."""
        counts, file = NgramCounts(self._longest, self._contexts), self._files.of(owner)
        try:
            head, _, packed = file.read_bytes().partition(b"\n")
            if json.loads(head) != self._head:
                raise ValueError("it was written with other options, or by another release")
            counts.unpack(_inflated(packed, len(counts.packed())), self._files.vocabulary)
        except FileNotFoundError:
            return counts
        except (OSError, ValueError, zlib.error) as error:
            log.warning("n-grams in %s are not read: %s", file, error)
            return NgramCounts(self._longest, self._contexts)
        return counts

    def write(self, owner: Owner, counts: NgramCounts) -> None:
        """Write an owner's counts as they are now, in another thread. Not while one is `busy`."""
        assert not self.busy, "a table is being written"
        name = "ngram-writer"
        self._writing = threading.Thread(target=self._write, args=(owner, counts.packed()), name=name, daemon=True)
        self._writing.start()

    def flush(self) -> None:
        """Wait until all is written."""
        if self._writing is not None:
            self._writing.join()

    def delete(self, tenant: str) -> None:
        """Remove a tenant's files. Raises OSError where one stays."""
        self.flush()  # it may be writing them
        with self._disk:
            delete_files(self._files.folder, tenant, ENDING)

    @property
    def _head(self) -> dict[str, Any]:
        return {
            "format": 1,
            "longest": self._longest,
            "contexts": self._contexts,
            "vocabulary": self._files.vocabulary,
            "byteorder": sys.byteorder,
            "hash": hash((1, 2, 3)),  # contexts are found by it, and another Python may have another
        }

    def _write(self, owner: Owner, table: bytes) -> None:
        file = self._files.of(owner)
        packed = json.dumps(self._head).encode() + b"\n" + zlib.compress(table, LEVEL)
        try:
            with self._disk:
                if not file.exists():
                    self._files.make_room(FILES)
                write_private(file, lambda path: path.write_bytes(packed))
        except Exception:  # a full disk, above all. The next write tries again.
            log.exception("n-grams are not kept on disk")


def _inflated(packed: bytes, size: int) -> bytes:
    """Return `size` bytes. Raise ValueError if there are more or fewer: a file may claim any number."""
    found = zlib.decompressobj().decompress(packed, size + 1)
    if len(found) != size:
        raise ValueError(f"its table has not {size} bytes")
    return found
