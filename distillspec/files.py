"""Files that another process may read: complete before they are visible, checkable afterwards."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distillspec.errors import RunError

DIGESTS = "sha256.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
OTHERS = 0o077  # the permissions of everyone but the owner


def sha256_of(path: Path) -> str:
    """Return the hex digest of a file's bytes, read in 1 MiB pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


@contextmanager
def clear_disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or read-only disk into a RunError of one line that names the path."""
    try:
        yield
    except RunError:
        raise
    except Exception as error:
        if _says_disk_full(error):
            raise RunError(f"the disk is full: could not write {path}; free some space and resume") from error
        if isinstance(error, OSError) and error.errno in (errno.EACCES, errno.EROFS, errno.EPERM):
            raise RunError(f"cannot write {path}: {error.strerror}") from error
        raise


def _says_disk_full(error: BaseException | None) -> bool:
    """Return True if a full disk caused an error. safetensors and SQLite say so in text, torch fails again on top."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            return True
        if any(words in str(error) for words in ("No space left on device", "database or disk is full")):
            return True
        error = error.__cause__ or error.__context__
    return False


def write_atomic(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write(temporary)` make a file, fsync it, then rename it to `path`.

    A reader sees the old file or the new one, never a part. On failure nothing is left behind.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with clear_disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            _fsync(temporary)
            os.replace(temporary, path)
            _fsync(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_private(path: Path, write: Callable[[Path], Any]) -> None:
    """Write as `write_atomic` does, a file that only this account may read."""

    def closed(temporary: Path) -> None:
        private_file(temporary)
        write(temporary)

    write_atomic(path, closed)


@contextmanager
def private_files() -> Iterator[None]:
    """Make files that this process and its children create inside the block private (0600, folders 0700)."""
    before = os.umask(OTHERS)
    try:
        yield
    finally:
        os.umask(before)


def private_folder(path: Path) -> None:
    """Make a folder, and missing ones above it, for this account alone. An existing one is closed to others."""
    for folder in reversed([one for one in (path, *path.parents) if not one.exists()]):
        folder.mkdir(mode=0o700, exist_ok=True)
    _close_to_others(path)


def private_file(path: Path) -> None:
    """Make an empty file for this account alone. An existing one keeps its content and is closed to others."""
    path.touch(mode=0o600)
    _close_to_others(path)


def _close_to_others(path: Path) -> None:
    found = path.stat()
    if found.st_mode & OTHERS and found.st_uid == os.geteuid():
        path.chmod(found.st_mode & 0o700)


def write_text(path: Path, text: str) -> None:
    write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    write_text(path, json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_png(path: Path, figure: Any) -> None:
    """Write a matplotlib figure."""
    write_atomic(path, lambda temporary: figure.savefig(temporary, format="png"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a file of one JSON object a line, none if there is no file.

    Lines that cannot be read are left out: a run that is going on or was killed may end in half a line.
    """
    if not path.is_file():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file that we wrote, empty if there is no file."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return found


def write_folder(path: Path, write: Callable[[Path], Any]) -> None:
    """Have `write(temporary_folder)` fill a folder, then put it in place of `path` in one rename.

    Adds `sha256.json` (file name → digest) so that `verify_folder` can detect a damaged folder.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with clear_disk_errors(path):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
            write(temporary)
            digests = {
                str(file.relative_to(temporary)): sha256_of(file)
                for file in sorted(temporary.rglob("*"))
                if file.is_file()
            }
            (temporary / DIGESTS).write_text(json.dumps(digests, indent=2) + "\n")
            for file in temporary.rglob("*"):
                _fsync(file)
            _replace_folder(temporary, path)
            _fsync(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def folder_bytes(path: Path) -> int:
    """Return the bytes of all files in a folder and below."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def verify_folder(path: Path) -> str | None:
    """Return the reason not to trust the folder, or None if every recorded digest matches."""
    record = path / DIGESTS
    if not record.is_file():
        return f"{record} is missing"
    try:
        digests = json.loads(record.read_text())
    except ValueError:
        return f"{record} is not readable"
    for name, digest in digests.items():
        file = path / name
        if not file.is_file():
            return f"{file} is missing"
        if sha256_of(file) != digest:
            return f"{file} does not match its recorded sha256 (truncated or changed)"
    return None


def _replace_folder(new: Path, path: Path) -> None:
    """Rename `new` to `path`. An old folder is moved aside first, since a rename cannot replace a full one."""
    if not path.exists():
        os.replace(new, path)
        return
    aside = path.with_name(f".{path.name}.{os.getpid()}.old")
    os.replace(path, aside)
    try:
        os.replace(new, path)
    except BaseException:
        aside.rename(path)
        raise
    shutil.rmtree(aside, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
