"""File lock between processes, of several containers too, released when its holder ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from distillspec.errors import RunError
from distillspec.files import private_file, private_folder


class Occupied(RunError):
    """Another process holds a lock."""


def is_held(path: Path) -> bool:
    """Return True if a process holds the lock file now, and does not share it."""
    try:
        with path.open("r") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@contextmanager
def held(path: Path, *, wait: bool = True, shared: bool = False, refusal: str = "") -> Iterator[None]:
    """Hold the lock file while the block runs.

    Args:
        shared: together with others that share it.
        refusal: start of the error's message. The holder's process id follows.

    Raises:
        Occupied: without `wait`, another process holds it.
    """
    private_folder(path.parent)
    private_file(path)
    kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
    with path.open("a+") as stream:
        try:
            fcntl.flock(stream, kind if wait else kind | fcntl.LOCK_NB)
        except BlockingIOError as error:
            stream.seek(0)
            raise Occupied(f"{refusal} (process {stream.read().strip() or 'unknown'})") from error
        stream.truncate(0)
        stream.write(str(os.getpid()))
        stream.flush()
        yield  # closing the file releases the lock
