"""Counts on disk: whole or not there, and nothing that is damaged or foreign is read."""

from __future__ import annotations

import json
import logging
import zlib
from pathlib import Path

import pytest

from distillspec.serving.proposers import ngram_files
from distillspec.serving.proposers.ngram_counts import NgramCounts
from distillspec.serving.proposers.ngram_files import NgramFiles

OWNER = ("a", "")
SIZES = (50, 2, 101)  # vocabulary, longest, contexts


def taught() -> NgramCounts:
    counts = NgramCounts(*SIZES[1:])
    for token in (2, 3, 2):
        counts.learn([1], token)
    return counts


def written(folder: Path) -> Path:
    files = NgramFiles(folder, *SIZES)
    files.write(OWNER, taught())
    files.flush()
    (file,) = folder.iterdir()
    return file


def test_counts_are_read_as_they_were_written_by_this_account_alone(tmp_path: Path) -> None:
    file = written(tmp_path)
    assert file.stat().st_mode & 0o777 == 0o600
    files = NgramFiles(tmp_path, *SIZES)
    assert files.read(OWNER).shares([1]) == taught().shares([1]) != {}
    assert files.read(("b", "")).shares([1]) == files.read(("a", "salt")).shares([1]) == {}
    again = files.read(OWNER)
    again.learn([1], 2)
    assert again.shares([1]) != taught().shares([1]), "a table that was read learns on"


def test_what_is_written_is_what_was_known_then(tmp_path: Path) -> None:
    files, counts = NgramFiles(tmp_path, *SIZES), taught()
    files.write(OWNER, counts)
    counts.learn([7], 8)
    files.flush()
    assert files.read(OWNER).shares([7]) == {}


@pytest.mark.parametrize("damage", ["cut", "changed", "other", "empty", "table", "ids", "long"])
def test_a_file_that_is_damaged_or_foreign_is_ignored_and_told(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = written(tmp_path)
    head, _, packed = file.read_bytes().partition(b"\n")
    table = bytearray(zlib.decompress(packed))
    table[8 * 101 : 8 * 101 + 4] = (50).to_bytes(4, "little")  # the first token's place: an id of no token
    changed = {
        "cut": head + b"\n" + packed[:-9],
        "changed": head + b"\n" + packed[:20] + bytes([packed[20] ^ 255]) + packed[21:],
        "other": json.dumps({**json.loads(head), "longest": 3}).encode() + b"\n" + packed,
        "empty": b"",
        "table": head + b"\n" + zlib.compress(bytes(10)),
        "ids": head + b"\n" + zlib.compress(bytes(table)),
        "long": head + b"\n" + zlib.compress(bytes(10 * len(table))),
    }
    file.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        found = NgramFiles(tmp_path, *SIZES).read(OWNER)
    assert found.shares([1]) == {}
    assert "are not read" in caplog.text
    assert file.name in caplog.text
    assert NgramFiles(written(tmp_path).parent, *SIZES).read(OWNER).shares([1]) != {}, "the next write replaces it"


def test_a_deletion_waits_for_what_is_being_written(tmp_path: Path) -> None:
    files = NgramFiles(tmp_path, *SIZES)
    for owner in (OWNER, ("a", "salt"), ("b", "")):
        files.write(owner, taught())
        files.flush()
    files.write(OWNER, taught())
    files.delete("a")
    assert len(list(tmp_path.iterdir())) == 1
    assert files.read(("b", "")).shares([1]) != {}


def test_a_full_disk_is_told_and_files_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ngram_files, "FILES", 3)
    files = NgramFiles(tmp_path, *SIZES)
    for salt in "abcde":
        files.write(("a", salt), taught())
        files.flush()
    assert len(list(tmp_path.iterdir())) == 3

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ngram_files, "write_private", full)
    files.write(OWNER, taught())
    files.flush()
    assert "n-grams are not kept on disk" in caplog.text
