"""Texts on disk by tenant, so that a store of them survives restarts. Appended, and cut to the newest at a start."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Sequence
from pathlib import Path

from distillspec.errors import RunError
from distillspec.files import private_folder, write_private

MARK = -1  # before each text: MARK, its number of tokens, its tokens


class AnswerFiles:
    """A file of int32 a tenant, named by a hash, readable by its owner alone.

    A text that a crash has cut off ends the file: it and whatever follows are not read.

    Raises:
        RunError: the folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            private_folder(folder)
        except OSError as error:
            raise RunError(f"folder={folder} cannot be used for answers: {error.strerror}") from error
        if not folder.is_dir():
            raise RunError(f"folder={folder} cannot be used for answers: it is no folder")

    def read(self, tenant: str, limit: int) -> list[list[int]]:
        """Return a tenant's newest texts, of at most `limit` tokens in all, oldest first. Older ones are removed."""
        texts, whole = _parsed(self._file(tenant))
        kept: list[list[int]] = []
        for text in reversed(texts):
            limit -= len(text)
            if limit < 0:
                break
            kept.insert(0, text)
        if len(kept) < len(texts) or not whole:
            packed = b"".join(map(_packed, kept))
            write_private(self._file(tenant), lambda path: path.write_bytes(packed))
        return kept

    def append(self, tenant: str, text: Sequence[int]) -> None:
        """Add a text. Nothing is forced to the disk: the newest ones may be lost with the machine."""
        try:
            handle = os.open(self._file(tenant), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(handle, _packed(text))
            finally:
                os.close(handle)
        except OSError as error:
            raise RunError(f"{self._file(tenant)} cannot be written: {error.strerror}") from error

    def delete(self, tenant: str) -> None:
        """Remove a tenant's file."""
        self._file(tenant).unlink(missing_ok=True)

    def _file(self, tenant: str) -> Path:
        return self.folder / f"{hashlib.sha256(tenant.encode()).hexdigest()[:24]}.tokens"


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
