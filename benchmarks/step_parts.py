"""Parts of whole steps with a draft: what passes take, and what the engine does beside them."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from sides import make_engine, read_prompts
from stopwatch import Stopwatch

from distillspec.models import LanguageModel
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.requests import Request
from distillspec.serving.draft_loading import load_draft

LENGTH = 4  # drafted tokens a row: a fixed number, or the most by goodput
CONTROLLERS = ("fixed", "goodput")
SAMPLING: dict[str, dict[str, float]] = {
    "greedy": {"temperature": 0.0},
    "temperature 1": {"temperature": 1.0},
    "top-p 0.95": {"temperature": 1.0, "top_p": 0.95},
}
READING = 64  # steps, at most, in which the first rows decode and prompts of others are read
WARM = 16  # steps that do not count: numbers get warm, lengths settle
EACH = 10  # steps that count, by `--rounds`
LONGEST_PROMPT = 256
# Most ms of own work a step, by rows: all that is neither a pass of the target nor drafting.
GOALS_MS = {
    "1": dict.fromkeys(SAMPLING, 1.5),
    "8": {"greedy": 2.0, "temperature 1": 5.0, "top-p 0.95": 8.0},
}


def steps(options: argparse.Namespace, target: LanguageModel) -> dict[str, Any]:
    """Time the parts of steps in the middle of answers, at a fixed length and at lengths by goodput.

    Returns:
        Medians in ms by batch, controller and kind of sampling, and the mean number of drafted tokens a row and step.
    """
    draft = load_draft(options.draft, target)
    prompts = read_prompts(options.prompts, target, max(options.batches), LONGEST_PROMPT)
    count = EACH * options.rounds
    tokens = (LENGTH + 1) * (READING + WARM + count)  # no answer ends, whatever is accepted
    settings = {"speculation_length": LENGTH, "max_model_len": LONGEST_PROMPT + tokens}
    by_batch: dict[str, dict[str, Any]] = {}
    for batch in options.batches:
        sides = by_batch[str(batch)] = {}
        for controller in CONTROLLERS:
            engine = make_engine(options, target, draft, batch, controller=controller, **settings)
            watch = Stopwatch(engine)
            sides[controller] = {}
            for name, sampling in SAMPLING.items():
                params = SamplingParams(**sampling, max_tokens=tokens, ignore_eos=True)
                sides[controller][name] = _timed(watch, prompts[:batch], params, count)
            engine.close()
            _show(batch, controller, sides[controller])
    met = _met(by_batch)
    return {"speculation_length": LENGTH, "steps": count, "batch": by_batch, "goals_ms": GOALS_MS, "met": met}


def _timed(watch: Stopwatch, prompts: Sequence[Sequence[int]], params: SamplingParams, count: int) -> dict[str, Any]:
    """Time `count` steps in which all rows decode, and leave the answers unfinished."""
    engine = watch.engine
    for row, prompt in enumerate(prompts):
        engine.submit(Request(str(row), tuple(prompt), params))
    while len(engine.sequences.decoding) < len(prompts):
        watch.step()
    for _ in range(WARM):
        watch.step()
    before = _drafted(engine)
    timed = [watch.step() for _ in range(count)]
    assert len(engine.sequences.decoding) == len(prompts), "an answer has ended"
    drafted = (_drafted(engine) - before) / (count * len(prompts))
    for row in range(len(prompts)):
        engine.abort(str(row))
    while engine.has_work:
        engine.step()
    parts = {part: 1e3 * statistics.median(step[part] for step in timed) for part in timed[0]}
    return {"drafted_tokens": drafted, "median_ms": parts}


def _drafted(engine: Engine) -> int:
    return sum(sequence.stats.proposed for sequence in engine.sequences.decoding)


def _met(by_batch: dict[str, dict[str, Any]]) -> dict[str, dict[str, dict[str, bool]]]:
    """Return where own work is within the goals, for the batches that have some."""
    return {
        batch: {
            controller: {name: kinds[name]["median_ms"]["own work"] <= goal for name, goal in GOALS_MS[batch].items()}
            for controller, kinds in sides.items()
        }
        for batch, sides in by_batch.items()
        if batch in GOALS_MS
    }


def _show(batch: int, controller: str, kinds: dict[str, Any]) -> None:
    table = Table(f"ms a step, batch {batch}, {controller}", *kinds)
    for part in next(iter(kinds.values()))["median_ms"]:
        table.add_row(part, *(f"{timed['median_ms'][part]:.2f}" for timed in kinds.values()))
    table.add_row("drafted tokens a row", *(f"{timed['drafted_tokens']:.2f}" for timed in kinds.values()))
    Console().print(table)
