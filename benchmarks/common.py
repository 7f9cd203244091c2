"""Results of benchmarks: their folder, and the machine that made them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distillspec.files import write_json
from distillspec.provenance import provenance

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"


def write_result(name: str, result: dict[str, Any], seed: int = 0, folder: Path = RESULTS) -> None:
    """Print the result and write it to `results/NAME.json` (or another folder's) with its provenance.

    A result of code that no commit names may not be quoted: it says so, and never takes the place of one in `results`.
    Paths on the command line are cut to their names: a result should not tell where somebody keeps files.
    """
    print(json.dumps(result, indent=2))
    argv = [",".join(map(_without_folder, word.split(","))) for word in sys.argv]
    record, changed = provenance(argv, seed), changed_files(ROOT)
    problem = _problem(record["git_commit"], changed)
    file = folder / (f"{name}.unquotable.json" if problem and folder == RESULTS else f"{name}.json")
    known = {**record, "git_dirty": None if changed is None else bool(changed), "quotable": problem is None}
    write_json(file, {**result, "provenance": known})
    if problem:
        print(f"\nDO NOT QUOTE THIS RESULT: {problem}. Commit and run again. It is in {file}\n", file=sys.stderr)


def _without_folder(word: str) -> str:
    return Path(word).name if word.startswith(("/", "~")) else word


def changed_files(root: Path) -> list[str] | None:
    """Return the uncommitted files of the checkout without benchmark results, None where git cannot tell."""
    command = ["git", "-C", str(root), "status", "--porcelain", "--", ".", ":(exclude)benchmarks/results"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line[3:] for line in done.stdout.splitlines()]


def _problem(commit: str | None, changed: list[str] | None) -> str | None:
    """Return why the result cannot be reproduced, None where the commit identifies the code."""
    if commit is None or changed is None:
        return "the commit of the code that ran is not known"
    return f"{changed[0]} is not as committed ({len(changed)} such files)" if changed else None


def peak_of(work: Callable[[], object]) -> int:
    """Return the peak of this process's resident bytes while it works."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from the present size
    work()
    return resident("VmHWM")


def resident(name: str = "VmRSS") -> int:
    """Return the bytes that Linux gives this process's status under a name, those of now by default."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


class Others:
    """Cores that other processes kept busy since this was made: what spoils a timing."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._own_s = time.process_time()
        self._busy_s = _busy_s()

    def cores(self) -> float | None:
        """None where the machine does not say (no /proc)."""
        busy_s = _busy_s()
        if self._busy_s is None or busy_s is None:
            return None
        others_s = busy_s - self._busy_s - (time.process_time() - self._own_s)
        return max(0.0, others_s / max(time.monotonic() - self._began_s, 1e-9))


def _busy_s() -> float | None:
    """Processor seconds of the whole machine that were not idle, stolen ones included."""
    stat = Path("/proc/stat")
    if not stat.is_file():
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
