"""What all benchmarks share: where results go, and on what machine they were made."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from distillspec.files import write_json
from distillspec.provenance import provenance

RESULTS = Path(__file__).parent / "results"


def write_result(name: str, result: dict[str, Any], seed: int = 0, folder: Path = RESULTS) -> None:
    """Print the result and write it to `results/NAME.json` (or another folder's) with its provenance.

    Paths on the command line are cut to their names: a result should not tell where somebody keeps files.
    """
    print(json.dumps(result, indent=2))
    argv = [Path(word).name if word.startswith(("/", "~")) else word for word in sys.argv]
    write_json(folder / f"{name}.json", {**result, "provenance": provenance(argv, seed)})


class Others:
    """Cores that other processes kept busy since this was made: what spoils a timing."""

    def __init__(self) -> None:
        self._began = time.monotonic(), time.process_time(), _busy_s()

    def cores(self) -> float | None:
        """None where the machine does not say (no /proc)."""
        wall, own, busy = self._began
        now = _busy_s()
        if busy is None or now is None:
            return None
        return max(0.0, (now - busy - (time.process_time() - own)) / max(time.monotonic() - wall, 1e-9))


def _busy_s() -> float | None:
    """Processor seconds of the whole machine that were not idle, stolen ones included."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
