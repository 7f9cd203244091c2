"""Folders of draft versions: written complete, checked by digest, cleared away."""

from __future__ import annotations

import hashlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from distillspec.errors import RunError
from distillspec.files import verify_folder
from distillspec.serving.online.state.lock import Occupied, held

FILLING = "filling.lock"  # held, together with others, while a folder is filled


@contextmanager
def incoming(versions: Path, write: Callable[[Path], Any]) -> Iterator[Path]:
    """Let `write(folder)` save a draft into a temporary folder. The block moves it to its place.

    Raises:
        RunError: the saved folder is not complete.
    """
    folder = versions / f".incoming-{uuid.uuid4().hex}"
    with held(versions / FILLING, shared=True):
        try:
            write(folder)
            if problem := verify_folder(folder):
                raise RunError(f"a new version is not complete: {problem}")
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def put_in_place(folder: Path, destination: Path) -> str:
    """Move a complete folder to its place and return its digest."""
    shutil.rmtree(destination, ignore_errors=True)  # left by a crash between this move and the registration
    os.replace(folder, destination)
    return digest_of(destination)


def digest_of(folder: Path) -> str:
    """Return one SHA-256 for all files: that of the folder's own list of digests."""
    return hashlib.sha256((folder / "sha256.json").read_bytes()).hexdigest()


def problem_with(folder: Path, digest: str | None) -> str | None:
    """Return why a folder is not what was registered with `digest`, or None if it is."""
    problem = verify_folder(folder)
    if problem is None and digest != digest_of(folder):
        problem = f"{folder} is not what was registered"
    return problem


def strays_in(versions: Path, known: Set[str]) -> list[Path]:
    """Return the folders that no version has. Incoming ones are left out while a process fills one."""
    strays = [path for path in versions.iterdir() if path.is_dir() and path.name not in known]
    try:
        with held(versions / FILLING, wait=False):
            return strays
    except Occupied:
        return [path for path in strays if not path.name.startswith(".")]
