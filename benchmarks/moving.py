"""Measure the share of a step that moves of accepted nodes in the cache take, with one row and with eight.

    python benchmarks/moving.py --prompts math.jsonl --draft RUN/draft

An engine drafts trees of a fixed shape. The moves that acceptance needs are timed in each step. After each step a path
of two nodes of every row is moved once more, to positions that the next step overwrites. That is the most that a step
of such trees can need, in memory as cold as the pass left it. Shares are of the step's seconds without these extra
moves. The goal is 2 %. Writes `results/moving.json`.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from common import write_result
from sides import make_engine, read_prompts
from torch import Tensor
from turns import turn_options

from distillspec.config import TargetConfig
from distillspec.models import load_target
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.draft_loading import load_draft

GOAL = 0.02
WIDTHS = [3, 2]
MOVED = ((3, 1), (5, 2))  # places behind the text's last, before and after: those of a second branch
WARM = 8  # steps that are not counted


class Watch:
    """The seconds of a cache's moves since `taken` was last called, and the rows that were moved."""

    def __init__(self, engine: Engine) -> None:
        self.spent = 0.0
        self.rows = 0
        self.plain = engine.runner.cache.gather
        engine.runner.cache.gather = self.timed  # type: ignore[method-assign]

    def timed(self, moves: Tensor) -> None:
        """Move, and note the time."""
        started = time.perf_counter()
        self.plain(moves)
        self.spent += time.perf_counter() - started
        self.rows += len(set(moves[0].tolist()))

    def taken(self) -> tuple[float, int]:
        """Return seconds and rows, and begin anew."""
        seconds_and_rows = self.spent, self.rows
        self.spent, self.rows = 0.0, 0
        return seconds_and_rows


def main() -> None:
    options = turn_options(__doc__ or "", (1, 8), steps=64)
    by_rows = {str(rows): _measure(options, rows) for rows in options.batches}
    met = {rows: figures["every_row"]["share"] <= GOAL for rows, figures in by_rows.items()}
    write_result(
        "moving", {"goal": GOAL, "widths": WIDTHS, "threads": torch.get_num_threads(), "rows": by_rows, "met": met}
    )


def _measure(options: Any, rows: int) -> dict[str, Any]:
    engine = _started(options, rows)
    watch = Watch(engine)
    steps_s = list[float]()
    accepted_s = list[float]()  # of the moves that acceptance asks for
    every_row_s = list[float]()  # of the moves of a path of every row
    moved_rows = list[int]()
    for step in range(WARM + options.steps):
        watch.taken()
        started = time.perf_counter()
        engine.step()
        seconds = time.perf_counter() - started
        moves_s, count = watch.taken()
        forced_s = _every_row(engine, watch)
        if step >= WARM:
            steps_s.append(seconds)
            accepted_s.append(moves_s)
            every_row_s.append(forced_s)
            moved_rows.append(count)
    engine.close()
    figures = {
        "step_ms": 1e3 * statistics.median(steps_s),
        "as_accepted": {"rows_a_step": statistics.fmean(moved_rows), "share": sum(accepted_s) / sum(steps_s)},
        "every_row": {
            "ms": 1e3 * statistics.median(every_row_s),
            "share": statistics.median(moves_s / step_s for moves_s, step_s in zip(every_row_s, steps_s, strict=True)),
        },
    }
    print(rows, figures, flush=True)
    return figures


def _started(options: Any, rows: int) -> Engine:
    """Return an engine in which so many rows decode, each long enough for all steps."""
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    draft = load_draft(options.draft, target)
    shape = {"tree": "given", "widths": WIDTHS, "speculation_length": len(WIDTHS)}
    engine = make_engine(options, target, draft, rows, **shape)
    params = SamplingParams(
        temperature=options.temperature, max_tokens=(2 + len(WIDTHS)) * (WARM + options.steps + rows), ignore_eos=True
    )
    for row, text in enumerate(read_prompts(options.prompts, target, rows)):
        engine.submit(Request(str(row), tuple(text), params))
    while len(engine.sequences.decoding) < rows:
        engine.step()
    return engine


def _every_row(engine: Engine, watch: Watch) -> float:
    """Return the seconds that moving a path of every row takes, with the list of moves."""
    started = time.perf_counter()
    moves = [
        (sequence.held_slot, sequence.computed + before, sequence.computed + after)
        for sequence in engine.sequences.decoding
        for before, after in MOVED
    ]
    with torch.inference_mode():
        watch.plain(torch.tensor(list(zip(*moves, strict=True))))
    return time.perf_counter() - started


if __name__ == "__main__":
    main()
