"""Lengths by goodput against every fixed length, by batch size, live in one process.

    python benchmarks/best_length.py --prompts math.jsonl --draft RUN/draft [--batches 1 2 4 8 16]

A round answers `batch` prompts that the draft was not trained on, with 256 tokens each. The sides take turns of eight
steps on the same running requests, in random order, so that a machine whose speed wanders is the same for all: fixed
lengths from 0 to 4, `controller=goodput` with the costs that the engine has measured at its start (the default), and an
engine without a draft beside it. Both engines have as many slots as the largest batch. The first step of a turn does
not count: a draft may have to read what it missed. Goodput goes on with what it has learnt, and all its turns count.
The best fixed length is chosen on the odd rounds and compared on the even ones. Intervals are Student's over rounds.
Writes `results/best_length.json`, with `--temperature 0` `best_length_t0.json`.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from typing import Any

import torch
from common import write_result
from scipy.stats import t as student
from sides import generate, greedy, make_engine, read_prompts

from distillspec.commands.unseen import trained_prompts
from distillspec.config import TargetConfig
from distillspec.models import load_target
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.base.requests import Request
from distillspec.serving.control.base import LengthController
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.draft_loading import load_draft

LONGEST = 4
TOKENS, TURN = 256, 8  # of an answer; steps of a side at a time
ALIKE = 4  # smaller batches have as many more rounds: one answer tells little
NO_DRAFT, PLAIN, GOODPUT = "no draft", "0", "goodput"
# Goodput over the best fixed length, its lower end, and tokens/s at length 0 over those without a draft.
GOALS = {"goodput": 0.98, "goodput_low": 0.96, "plain": 0.97}


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    alone = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    draft = load_draft(options.draft, target)
    seen = trained_prompts(draft.lineage)
    most = max(options.batches)
    prompts = read_prompts(options.prompts, target, options.rounds * max(ALIKE, most), without=seen)
    engine = make_engine(options, target, draft, most, speculation_length=LONGEST, controller="goodput")
    plain = make_engine(options, alone, None, most)
    found = {}
    for batch in options.batches:
        found[str(batch)] = _judged(_rates(options, engine, plain, prompts, batch))
        print(f"batch {batch}: {found[str(batch)]}", flush=True)
    machine = {"dtype": str(target.dtype), "threads": torch.get_num_threads(), "draft": draft.kind}
    setting = {
        "tokens": TOKENS,
        "steps_a_turn": TURN,
        "temperature": options.temperature,
        "rounds": options.rounds,
        "goals": GOALS,
    }
    name = "best_length" if options.temperature else "best_length_t0"
    write_result(name, {**machine, **setting, "batch": found})


def _rates(
    options: argparse.Namespace, engine: Engine, plain: Engine, prompts: list[list[int]], batch: int
) -> dict[str, list[float]]:
    """Return the tokens a second of each side by round."""
    controllers: dict[str, LengthController] = {str(k): FixedLength(k) for k in range(LONGEST + 1)}
    controllers[GOODPUT] = GoodputController(LONGEST, engine.costs)
    params = SamplingParams(temperature=options.temperature, max_tokens=TOKENS, ignore_eos=True)
    rates: dict[str, list[float]] = {name: [] for name in (NO_DRAFT, *controllers)}
    chance = random.Random(0)
    for k in (0, 1, LONGEST):  # warm up
        engine.use_controller(controllers[str(k)])
        generate(engine, prompts[:batch], greedy(32))
    generate(plain, prompts[:batch], greedy(32))
    for round_ in range(options.rounds * max(1, ALIKE // batch)):
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


def _judged(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Choose the best fixed length on odd rounds, and compare on the even ones."""
    fixed = [str(k) for k in range(LONGEST + 1)]
    best = max(fixed, key=lambda name: statistics.median(rates[name][::2]))  # rounds 1, 3, …
    goodput = _interval(_ratios(rates, GOODPUT, best)[1::2])
    plain = _interval(_ratios(rates, PLAIN, NO_DRAFT))
    return {
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "times_plain": {name: _interval(_ratios(rates, name, PLAIN)) for name in rates},
        "best_length": int(best),
        "goodput_over_best": goodput,
        "plain_over_no_draft": plain,
        "met": {
            "goodput": goodput["mean"] >= GOALS["goodput"] and goodput["low"] >= GOALS["goodput_low"],
            "plain": plain["median"] >= GOALS["plain"],
        },
        "rounds": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
    }


def _ratios(rates: dict[str, list[float]], name: str, other: str) -> list[float]:
    return [a / b for a, b in zip(rates[name], rates[other], strict=True)]


def _interval(ratios: list[float]) -> dict[str, float]:
    """Return mean, median and the 95 % interval of the mean."""
    mean = statistics.fmean(ratios)
    half = float(student.ppf(0.975, len(ratios) - 1)) * statistics.stdev(ratios) / len(ratios) ** 0.5
    return {"mean": mean, "low": mean - half, "high": mean + half, "median": statistics.median(ratios)}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    options = parser.parse_args()
    if options.rounds < 4:
        parser.error(f"--rounds {options.rounds}: two odd and two even ones are needed, so at least 4")
    return options


if __name__ == "__main__":
    main()
