"""An online folder for hard use: its first versions, a trainer of its own that is killed, a disk that is full."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from distillspec.config import DraftConfig, TargetConfig
from distillspec.models import initialise_draft, load_target, save_draft
from distillspec.serving.online.state.registry import VersionRegistry

CHUNK_BYTES = 1 << 20


def make_versions(folder: Path) -> None:
    """Register two drafts in the folder. The first is promoted."""
    target = load_target(TargetConfig(path="tiny", dtype="float32", device="cpu"))
    registry = VersionRegistry(folder / "versions")
    for layers in (2, 3):
        draft = initialise_draft(DraftConfig(layers=layers), target)
        version = registry.add(lambda path, draft=draft: save_draft(draft, path, target))  # type: ignore[misc]
        if layers == 2:
            registry.promote(version.name, "the first draft")
        else:
            registry.judged(version.name, "inconclusive", {}, "swapped in by hand")
    registry.close()


class DecoupledTrainer:
    """`distill adapt` in a session of its own, no child of the server. Whenever it has ended, it is started again.

    Args:
        folder: of its runs and of what it says.
        settings: of the command.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self._folder, self._words = folder, [f"{name}={value}" for name, value in settings.items()]
        self._process: subprocess.Popen[bytes] | None = None
        self._killed = False
        self.starts = 0
        self.ended: list[str] = []  # last lines of those that nobody killed

    @property
    def pid(self) -> int:
        """Process id of the one that runs."""
        if self._process is None or self._process.poll() is not None:
            self._start()
        assert self._process is not None
        return self._process.pid

    def kill(self) -> None:
        """Kill the one that runs, if any."""
        if self._process is None or self._process.poll() is not None:
            return
        self._killed = True
        with suppress(ProcessLookupError):  # it has just ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _start(self) -> None:
        if self._process is not None and not self._killed:
            self.ended.append(self._told.read_text()[-300:])
        self._killed = False
        self.starts += 1
        run = [f"hydra.run.dir={self._folder / f'adapt-{self.starts}'}"]
        with self._told.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "distillspec.cli", "adapt", *self._words, *run],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )

    @property
    def _told(self) -> Path:
        return self._folder / "adapt.log"


class Disk:
    """A folder on a file system of its own, which can be filled up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._ballast = folder / "ballast"

    def fill(self) -> None:
        """Leave no byte. Files that are removed make room again: call it once more."""
        with suppress(OSError), self._ballast.open("ab", buffering=0) as stream:
            while True:
                stream.write(bytes(min(CHUNK_BYTES, shutil.disk_usage(self.folder).free) or 1))

    def empty(self) -> None:
        """Give the room back."""
        self._ballast.unlink(missing_ok=True)


@contextmanager
def small_disk(mib: int) -> Iterator[Disk | None]:
    """Mount a file system of this size in memory, and unmount it. None: this account may not."""
    with tempfile.TemporaryDirectory() as folder:
        command = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", folder]
        try:
            mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
        except FileNotFoundError:  # no such command here
            mounted = False
        if not mounted:
            yield None
            return
        try:
            yield Disk(Path(folder))
        finally:
            subprocess.run(["umount", "-l", folder], check=True)
