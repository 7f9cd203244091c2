"""Helpers of the log's tests: bounded logs, full disks, and a search for text on disk."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import torch

from distillspec.config import ReplayConfig
from distillspec.files import write_atomic
from distillspec.serving.online.log.records import LogKey
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.log.shard import save_shard
from distillspec.serving.online.log.writer import LogWriter
from distillspec.serving.online.state.layout import OnlineSettings

from ..conftest import Answer

SECRET = tuple(range(100, 120))


def names(replay: ReplayLog) -> list[str]:
    return [entry.request_id for entry in replay.entries()]


def traces(folder: Path, request_id: str, *texts: Sequence[int]) -> set[str]:
    """Return the files that contain a request: its id, or its tokens as integers of any width or as JSON."""
    marks = [request_id.encode()]
    for text in texts:
        kinds = (torch.uint16, torch.int32, torch.int64)
        marks += [torch.tensor(text).to(kind).numpy().tobytes() for kind in kinds]
        marks += [mark.join(map(str, text)).encode() for mark in (",", ", ")]
    return {path.name for path in folder.rglob("*") if any(mark in _content(path) for mark in marks)}


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes() if path.is_file() else b""
    except FileNotFoundError:  # a temporary file, renamed since
        return b""


@contextmanager
def manifest_of(replay: ReplayLog) -> Iterator[sqlite3.Connection]:
    """A second connection to the log's manifest, committed and closed at the end."""
    connection = sqlite3.connect(replay.folder / "manifest.sqlite")
    with closing(connection), connection:
        yield connection


def start_and_stop(replay: ReplayLog) -> None:
    """Start and stop a writer, as a server does."""
    writer = LogWriter(replay)
    writer.start()
    writer.stop()


def budgeted(settings: OnlineSettings, key: LogKey, answer: Answer, shards: int, **config: object) -> ReplayLog:
    """Return a log with room for about `shards` shards of one answer."""
    save_shard(Path(settings.online.folder).parent / "one", [answer("x")], key)
    size = (Path(settings.online.folder).parent / "one").stat().st_size
    made = ReplayConfig(max_mib=(shards + 0.5) * size / 2**20, **config)  # type: ignore[arg-type]
    return ReplayLog(settings.layout.replay, key, made, clock=lambda: 2000.0)


class Quota:
    """A disk with `room` bytes left."""

    def __init__(self, room: int) -> None:
        self.room = room

    def __call__(self, path: Path, write) -> None:  # type: ignore[no-untyped-def]
        def limited(temporary: Path) -> None:
            write(temporary)
            size = temporary.stat().st_size
            if size > self.room:
                raise OSError(errno.ENOSPC, "No space left on device")
            self.room -= size

        write_atomic(path, limited)
