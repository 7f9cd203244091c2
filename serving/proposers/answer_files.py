"""Texts on disk, so that a store of them survives restarts."""

from __future__ import annotations

import logging
import os
from array import array
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from distillspec.files import private_file, write_private
from distillspec.serving.base.owner_files import Owner, OwnerFiles, delete_files

log = logging.getLogger(__name__)

ENDING = ".tokens"
FILES = 1024  # the most that are kept
MARK = -1  # before each text: MARK, its number of tokens, its tokens


class AnswerFiles:
    """A file of int32 for each owner of texts, a tenant and its cache salt, readable by this account alone.

    A text that a crash has cut off ends the file: it and whatever follows are not read.

    Args:
        others: folders of other stores, whose texts are read too. One that is not there yet has none.

    Raises:
        RunError: the folder cannot be made.
    """

    def __init__(self, folder: Path, vocabulary: int, others: Sequence[Path] = ()) -> None:
        self.folder, self.vocabulary = folder, vocabulary
        self.others = [other for other in others if other.resolve() != folder.resolve()]
        self._files = OwnerFiles(folder, vocabulary, ENDING)

    def read(self, owner: Owner, limit: int) -> list[list[int]]:
        """Return the newest texts of an owner, of at most `limit` tokens in all, oldest first. Others are removed.

        Those of other folders come before its own, as far as there is room, and stay as they are there.

        Raises OSError if the file cannot be read or written.
        """
        file = self._files.of(owner)
        texts, whole = _parsed(file)
        kept = self._newest(texts, limit)
        if len(kept) < len(texts) or not whole:
            packed = b"".join(map(_packed, kept))
            write_private(file, lambda path: path.write_bytes(packed))
        return [*self._newest(self._of_others(file.name), limit - sum(map(len, kept))), *kept]

    def _newest(self, texts: Sequence[Sequence[int]], limit: int) -> list[list[int]]:
        """Return the last texts, of at most `limit` tokens in all, without those of another vocabulary."""
        kept: list[list[int]] = []
        for text in reversed(texts):
            limit -= len(text)
            if limit < 0:
                break
            if all(0 <= token < self.vocabulary for token in text):
                kept.insert(0, list(text))
        return kept

    def _of_others(self, name: str) -> list[list[int]]:
        """Return the texts of an owner in other folders, those of the file that was written to last at the end."""
        found = list[tuple[float, list[list[int]]]]()
        for file in [folder / name for folder in self.others]:
            try:
                found.append((file.stat().st_mtime, _parsed(file)[0]))
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("%s is not merged: %s", file, error.strerror)
        return [text for _, texts in sorted(found, key=itemgetter(0)) for text in texts]

    def append(self, owner: Owner, text: Sequence[int]) -> None:
        """Add a text. Nothing is forced to the disk: the newest may be lost with the machine. Raises OSError."""
        file = self._files.of(owner)
        if not file.exists():
            self._files.make_room(FILES)
        private_file(file)
        size = file.stat().st_size
        try:
            with file.open("ab") as handle:
                handle.write(_packed(text))
        except OSError:  # a text cut off would hide those behind it
            os.truncate(file, size)
            raise

    def delete(self, tenant: str) -> None:
        """Remove all files of a tenant, in other folders too. Raises OSError."""
        for folder in (self.folder, *self.others):
            delete_files(folder, tenant, ENDING)


def _packed(text: Sequence[int]) -> bytes:
    return array("i", [MARK, len(text), *text]).tobytes()


def _parsed(file: Path) -> tuple[list[list[int]], bool]:
    """Return the texts of a file, and whether it holds nothing but whole ones."""
    if not file.exists():
        return [], True
    numbers = array("i")
    raw = file.read_bytes()
    numbers.frombytes(raw[: len(raw) // numbers.itemsize * numbers.itemsize])
    texts, place = [], 0
    while place + 2 <= len(numbers) and numbers[place] == MARK and 0 <= numbers[place + 1] <= len(numbers) - place - 2:
        end = place + 2 + numbers[place + 1]
        texts.append(numbers[place + 2 : end].tolist())
        place = end
    return texts, place * numbers.itemsize == len(raw)
