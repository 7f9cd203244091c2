"""Controllers that take turns on the same running requests, so that a machine whose speed wanders is the same for all.

A round answers `batch` prompts that the draft was not trained on. The sides take turns of eight steps, in random order:
controllers of one engine, and an engine without a draft beside it. The first step of a turn does not count: a draft may
have to read what it missed.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Mapping

from scipy.stats import t as student
from sides import generate, greedy

from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.requests import Request
from distillspec.serving.control.base import LengthController

TURN = 8  # steps of a side at a time
ALIKE = 4  # smaller batches have as many more rounds: one answer tells little
NO_DRAFT = "no draft"


def rates_by_turns(
    engine: Engine,
    plain: Engine,
    controllers: Mapping[str, LengthController],
    prompts: list[list[int]],
    batch: int,
    rounds: int,
    params: SamplingParams,
) -> dict[str, list[float]]:
    """Return the tokens a second of each controller by round, and of `plain` as "no draft"."""
    rates: dict[str, list[float]] = {name: [] for name in (NO_DRAFT, *controllers)}
    chance = random.Random(0)
    for controller in controllers.values():  # warm up
        engine.use_controller(controller)
        generate(engine, prompts[:batch], greedy(16))
    generate(plain, prompts[:batch], greedy(32))
    for round_ in range(rounds * max(1, ALIKE // batch)):
        texts = prompts[round_ * batch : (round_ + 1) * batch]
        for side in (engine, plain):
            _begin(side, texts, params)
        spent: dict[str, list[tuple[int, float]]] = {name: [] for name in rates}
        while len(engine.sequences.decoding) == batch:
            for name in chance.sample(list(rates), len(rates)):
                if name in controllers:
                    engine.use_controller(controllers[name])
                spent[name] += _steps(plain if name == NO_DRAFT else engine, batch)
        for side in (engine, plain):
            _end(side)
        for name, found in spent.items():
            tokens, seconds = map(sum, zip(*found, strict=True))
            rates[name].append(tokens / seconds)
    return rates


def prompts_needed(rounds: int, batches: list[int]) -> int:
    """Return how many prompts the rounds of all batches take at most."""
    return rounds * max(ALIKE, *batches)


def best_of(rates: Mapping[str, list[float]], names: list[str]) -> str:
    """Return the best of some sides by its median over rounds 1, 3, …."""
    return max(names, key=lambda name: statistics.median(rates[name][::2]))


def ratios(rates: Mapping[str, list[float]], name: str, other: str) -> list[float]:
    """Return a side's rate over another's, by round."""
    return [a / b for a, b in zip(rates[name], rates[other], strict=True)]


def interval(found: list[float]) -> dict[str, float]:
    """Return mean, median and the 95 % interval of the mean (Student's)."""
    mean = statistics.fmean(found)
    half = float(student.ppf(0.975, len(found) - 1)) * statistics.stdev(found) / len(found) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "median": statistics.median(found)}


def _begin(engine: Engine, texts: list[list[int]], params: SamplingParams) -> None:
    """Submit the prompts and read them."""
    for row, text in enumerate(texts):
        engine.submit(Request(str(row), tuple(text), params))
    while len(engine.sequences.decoding) < len(texts):
        engine.step()


def _steps(engine: Engine, batch: int) -> list[tuple[int, float]]:
    """Return tokens and seconds of the next steps in which all rows decode, without the first."""
    found = []
    for _ in range(TURN):
        if len(engine.sequences.decoding) < batch:
            break
        started = time.perf_counter()
        output = engine.step()
        found.append((sum(len(delta.token_ids) for delta in output.deltas), time.perf_counter() - started))
    return found[1:]


def _end(engine: Engine) -> None:
    """Leave what is unfinished."""
    for name in list(engine.sequences.unfinished):
        engine.abort(name.split("/")[0])
    while engine.has_work:
        engine.step()
