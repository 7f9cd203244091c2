"""A side of the live comparison: one server with its trainer, driven over HTTP in turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from distillspec.recipes.served import served
from distillspec.serving.bench.drive_server import drive_server
from distillspec.serving.bench.load import Arrival, Question
from distillspec.serving.bench.records import LoadRecord
from distillspec.serving.bench.servers import Server, find_server

SIDES = ("none", "static", "online")
ANSWER_S = 120.0  # that one answer may take


@dataclass(frozen=True)
class CpuSeconds:
    """CPU time of a side's processes since their start."""

    server: float
    trainer: float

    def since(self, before: CpuSeconds) -> CpuSeconds:
        return CpuSeconds(self.server - before.server, self.trainer - before.trainer)


@dataclass(frozen=True)
class Turn:
    """One turn of one side: a load, whole. Times are seconds since the epoch."""

    began_s: float
    ended_s: float
    record: LoadRecord
    cpu: CpuSeconds


class Side:
    """A running server. It and its trainer are suspended between turns, so that they do not slow the other sides.

    Args:
        folder: the online folder. None: this side does not learn.
    """

    def __init__(self, name: str, server: Server, process: psutil.Process, folder: Path | None) -> None:
        self.name = name
        self.folder = folder
        self.turns = list[Turn]()
        self._server = server
        self._process = process

    def serve(self, arrivals: Sequence[Arrival[Question]]) -> Turn:
        """Send a load, and wait until all of it is answered."""
        before = self._cpu_seconds()
        self.let_run(True)
        began_s = time.time()
        record = drive_server(self._server, arrivals, ANSWER_S)
        ended_s = time.time()
        self.let_run(False)
        self.turns.append(Turn(began_s, ended_s, record, self._cpu_seconds().since(before)))
        return self.turns[-1]

    def let_run(self, may: bool) -> None:
        """Stop the server, then its trainer, or let them go on."""
        for process in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.NoSuchProcess):
                process.resume() if may else process.suspend()

    def _cpu_seconds(self) -> CpuSeconds:
        server = self._process.cpu_times()
        trainer = server.children_user + server.children_system  # of trainers that have ended
        for child in self._process.children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                trainer += sum(child.cpu_times()[:2])
        return CpuSeconds(server.user + server.system, trainer)


@contextmanager
def running_side(name: str, draft: str, output: Path, words: Sequence[str]) -> Iterator[Side]:
    """Run `distill serve` with its default settings and `words`.

    Raises:
        RunError: the server did not start.
    """
    folder = output.absolute() / "online" if name == "online" else None
    settings = list(words)
    settings += [] if name == "none" else [f"draft.path={Path(draft).absolute()}"]
    settings += [] if folder is None else ["online=on", f"online.folder={folder}"]
    with served(*settings) as server:
        side = Side(name, find_server(server.url, None, "", ""), psutil.Process(server.process.pid), folder)
        side.let_run(False)
        try:
            yield side
        finally:
            side.let_run(True)  # a stopped process would not notice the end
