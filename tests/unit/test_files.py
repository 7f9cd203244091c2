"""Files are whole or absent, and a full disk is one line."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from distillspec.errors import RunError
from distillspec.files import (
    folder_bytes,
    private_file,
    private_files,
    private_folder,
    read_lines,
    sha256_of,
    verify_folder,
    write_atomic,
    write_folder,
    write_json,
    write_private,
    write_text,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def full_disk(*args: object, **kwargs: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def fill(folder: Path, text: str = "new") -> None:
    (folder / "inner").mkdir()
    (folder / "a.txt").write_text(text)
    (folder / "inner" / "b.txt").write_text(text)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "f"
    write_text(path, "old")

    def half(temporary: Path) -> None:
        temporary.write_text("ha")
        raise ValueError("stopped half way")

    with pytest.raises(ValueError, match="half way"):
        write_atomic(path, half)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["f"]


def test_a_write_replaces_the_old_file_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "f.json"
    write_json(path, {"b": 1, "a": Path("x")})
    write_json(path, {"a": 2})
    assert path.read_text() == '{\n  "a": 2\n}\n'
    assert names(path.parent) == ["f.json"]


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "pathlib.Path.write_text"])
def test_a_full_disk_is_one_line_and_leaves_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    write_text(tmp_path / "f", "old")
    monkeypatch.setattr(where, full_disk)
    with pytest.raises(RunError) as failed:
        write_text(tmp_path / "f", "new")
    monkeypatch.undo()
    assert str(failed.value).startswith("the disk is full")
    assert str(tmp_path / "f") in str(failed.value)
    assert "\n" not in str(failed.value)
    assert (tmp_path / "f").read_text() == "old"
    assert names(tmp_path) == ["f"]


@pytest.mark.parametrize("where", ["os.replace", "os.fsync", "pathlib.Path.write_text", "pathlib.Path.mkdir"])
def test_a_full_disk_leaves_the_old_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str) -> None:
    write_folder(tmp_path / "d", lambda folder: fill(folder, "old"))
    monkeypatch.setattr(where, full_disk)
    with pytest.raises(RunError, match="the disk is full"):
        write_folder(tmp_path / "d", fill)
    monkeypatch.undo()
    assert verify_folder(tmp_path / "d") is None
    assert (tmp_path / "d" / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["d"]


def test_a_rename_that_fails_half_way_puts_the_old_folder_back(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    write_folder(tmp_path / "d", lambda folder: fill(folder, "old"))
    real, calls = os.replace, []

    def second_fails(source: Path, destination: Path) -> None:
        calls.append(destination)
        if len(calls) == 2:
            full_disk()
        real(source, destination)

    monkeypatch.setattr(os, "replace", second_fails)
    with pytest.raises(RunError, match="the disk is full"):
        write_folder(tmp_path / "d", fill)
    assert (tmp_path / "d" / "a.txt").read_text() == "old"
    assert names(tmp_path) == ["d"]


def test_libraries_that_wrap_the_error_are_understood(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")

    with pytest.raises(RunError, match="the disk is full"):
        write_atomic(tmp_path / "f", write)


@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="needs /dev/full")
def test_what_torch_makes_of_a_full_disk_is_understood(tmp_path: Path) -> None:
    """Its archive writer fails again while closing, and that second error is the one that arrives."""

    def write(folder: Path) -> None:
        with Path("/dev/full").open("wb") as stream:
            try:
                torch.save({"weights": torch.zeros(100_000)}, stream)
            finally:
                raise RuntimeError("unexpected pos 768 vs 598")

    with pytest.raises(RunError, match="the disk is full"):
        write_folder(tmp_path / "d", write)
    assert names(tmp_path) == []


def test_a_folder_that_may_not_be_written_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(RunError, match=r"cannot write .*Read-only file system"):
        write_text(tmp_path / "f", "new")


def test_other_errors_pass_unchanged(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        raise OSError(errno.EIO, "broken")

    with pytest.raises(OSError, match="broken"):
        write_atomic(tmp_path / "f", write)


def test_a_written_folder_verifies_and_each_kind_of_damage_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "d"
    write_folder(folder, fill)
    assert verify_folder(folder) is None
    inner = folder / "inner" / "b.txt"
    inner.write_text("ne")
    assert "b.txt does not match" in str(verify_folder(folder))
    inner.unlink()
    assert "b.txt is missing" in str(verify_folder(folder))
    (folder / "sha256.json").write_text("{")
    assert "not readable" in str(verify_folder(folder))
    (folder / "sha256.json").unlink()
    assert "sha256.json is missing" in str(verify_folder(folder))
    assert verify_folder(tmp_path / "nowhere") is not None


def test_the_bytes_of_a_folder_are_those_of_all_its_files(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "one").write_bytes(bytes(300))
    (tmp_path / "below" / "two").write_bytes(bytes(45))
    assert folder_bytes(tmp_path) == 345


def test_sha256_is_that_of_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"abc")
    assert sha256_of(tmp_path / "f") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


@pytest.fixture
def usual_umask() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_private_files_and_folders_are_closed_to_others(tmp_path: Path, usual_umask: None) -> None:
    private_folder(tmp_path / "a" / "b")
    write_private(tmp_path / "a" / "text", lambda temporary: temporary.write_text("secret"))
    private_file(tmp_path / "a" / "empty")
    assert [mode(tmp_path / name) for name in ("a", "a/b", "a/text", "a/empty")] == [0o700, 0o700, 0o600, 0o600]
    assert (tmp_path / "a" / "text").read_text() == "secret"
    write_text(tmp_path / "usual", "")
    assert mode(tmp_path / "usual") == 0o644


def test_what_was_open_is_closed_and_keeps_its_content(tmp_path: Path, usual_umask: None) -> None:
    (tmp_path / "old").mkdir()
    write_text(tmp_path / "old" / "text", "kept")
    private_folder(tmp_path / "old")
    private_file(tmp_path / "old" / "text")
    assert [mode(tmp_path / "old"), mode(tmp_path / "old" / "text")] == [0o700, 0o600]
    assert (tmp_path / "old" / "text").read_text() == "kept"


def test_inside_the_block_everything_is_private(tmp_path: Path, usual_umask: None) -> None:
    with private_files():
        (tmp_path / "folder").mkdir()
        write_json(tmp_path / "folder" / "f", {})
    assert [mode(tmp_path / "folder"), mode(tmp_path / "folder" / "f")] == [0o700, 0o600]
    write_json(tmp_path / "g", {})
    assert mode(tmp_path / "g") == 0o644


def test_lines_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    assert read_lines(file) == []
    file.write_bytes(b'{"a": 1}\n[2]\nnonsense\n\xff\n{"b": 2}\n{"half')
    assert read_lines(file) == [{"a": 1}, {"b": 2}]
