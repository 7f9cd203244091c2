"""Running the study's cells: one after another in this process, or several processes at once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.recipes.distillspec.grid import LOSSES, SOURCES, Study, cell_command
from distillspec.recipes.runs import resumable, summary_of


def unfinished(study: Study) -> list[tuple[str, str]]:
    """Return (loss, source) of every cell without a summary, source by source."""
    grid = [(loss, source) for source in SOURCES for loss in LOSSES]
    return [cell for cell in grid if summary_of(study.cell(*cell)) is None]


def run_cells(study: Study, after_each: Callable[[], object]) -> int:
    """Run the unfinished cells. Stop at the first failure and return its exit code."""
    if study.jobs == 1:
        return _one_by_one(study, after_each)
    return _side_by_side(study, after_each)


def _one_by_one(study: Study, after_each: Callable[[], object]) -> int:
    for loss, source in unfinished(study):
        print(f"--- {loss} on {source}", flush=True)
        code = distill(_command(study, loss, source))
        if code:
            return code
        after_each()
    return 0


def _side_by_side(study: Study, after_each: Callable[[], object]) -> int:
    """Run `study.jobs` processes at once, each with its share of the cores."""
    with ThreadPoolExecutor(study.jobs) as pool:
        running = {pool.submit(_process, study, *cell): cell for cell in unfinished(study)}
        for future in as_completed(running):
            code, log = future.result()
            print(
                f"--- {' on '.join(running[future])}: {'done' if code == 0 else f'exit code {code}, see {log}'}",
                flush=True,
            )
            if code:
                pool.shutdown(wait=True, cancel_futures=True)
                return code
            after_each()
    return 0


def _process(study: Study, loss: str, source: str) -> tuple[int, Path]:
    """Run one cell as a process with its output in a log beside its folder. Return (exit code, log)."""
    log = study.cell(loss, source).with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    threads = max(1, (os.cpu_count() or 1) // study.jobs)
    command = [sys.executable, "-m", "distillspec.cli", *_command(study, loss, source)]
    with log.open("ab") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": str(threads)}
        )
    return done.returncode, log


def _command(study: Study, loss: str, source: str) -> list[str]:
    return resumable(cell_command(study, loss, source), study.cell(loss, source))
