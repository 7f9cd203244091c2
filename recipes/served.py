"""A `distill serve` process for studies and benchmarks over HTTP."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from distillspec.errors import RunError

ADMIN_KEY = "only-for-this-benchmark"


@dataclass(frozen=True)
class Served:
    """A running server. `log` is its stderr, one JSON line a request."""

    process: subprocess.Popen[str]
    url: str
    log: IO[str]

    @property
    def host_and_port(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    def failures(self) -> list[str]:
        """Return the errors in the log, each with the last line of its traceback."""
        # Opened again by its name: `seek` would move the position at which the server writes.
        content = Path(self.log.name).read_text().splitlines(keepends=True)
        lines = [json.loads(line) for line in content if line.startswith("{") and line.endswith("\n")]
        bad = [line for line in lines if line["level"] in ("error", "critical")]
        return [f"{line['message']}: {line.get('exception', '').strip().splitlines()[-1:]}" for line in bad]


@contextmanager
def served(*words: str, threads: int | None = None) -> Iterator[Served]:
    """Run `distill serve` with these settings on a free port, in a folder that is removed afterwards.

    Args:
        words: overrides of settings.
        threads: of torch. Use one for tiny models: two would mostly wait for each other.

    Raises:
        RunError: the server did not start.
    """
    limits = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    with tempfile.TemporaryDirectory() as folder, (Path(folder) / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "distillspec.cli", "serve", "server.port=0", "hydra.run.dir=run", *words],
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **limits, "DISTILLSPEC_ADMIN_KEY": ADMIN_KEY},
        )
        assert process.stdout is not None
        try:
            match = re.search(r"http://[\d.:]+", process.stdout.readline())
            if match is None:
                log.seek(0)
                raise RunError(f"the server did not start: {log.read()[-2000:]}")
            process.stdout.readline()
            yield Served(process, match[0], log)
        finally:
            process.terminate()
            process.wait(60)
            process.stdout.close()
