"""Lengths by goodput against every fixed length, by batch size, live in one process.

    python benchmarks/best_length.py --prompts math.jsonl --draft RUN/draft [--batches 1 2 4 8 16]

The sides take turns (`turns.py`) with answers of 256 tokens: fixed lengths from 0 to 4, `controller=goodput` over
chains with the costs that the engine has measured at its start, and an engine without a draft. Both engines have as
many slots as the largest batch. Goodput goes on with what it has learnt, and all its turns count. The best fixed length
is chosen on the odd rounds and compared on the even ones. Writes `results/best_length.json`, with `--temperature 0`
`best_length_t0.json`.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import torch
from common import write_result
from sides import make_engine, read_prompts
from turns import NO_DRAFT, TURN, best_of, interval, prompts_needed, rates_by_turns, ratios

from distillspec.commands.unseen import trained_prompts
from distillspec.config import TargetConfig
from distillspec.models import load_target
from distillspec.serving import SamplingParams
from distillspec.serving.control.base import LengthController
from distillspec.serving.control.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.draft_loading import load_draft

LONGEST = 4
TOKENS = 256  # of an answer
PLAIN, GOODPUT = "0", "goodput"
# Goodput over the best fixed length, its lower end, and tokens/s at length 0 over those without a draft.
GOALS = {"goodput": 0.98, "goodput_low": 0.96, "plain": 0.97}


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    alone = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    draft = load_draft(options.draft, target)
    most = max(options.batches)
    count = prompts_needed(options.rounds, options.batches)
    prompts = read_prompts(options.prompts, target, count, without=trained_prompts(draft.lineage))
    engine = make_engine(options, target, draft, most, speculation_length=LONGEST, controller="goodput", tree="off")
    plain = make_engine(options, alone, None, most)
    params = SamplingParams(temperature=options.temperature, max_tokens=TOKENS, ignore_eos=True)
    found = {}
    for batch in options.batches:
        controllers: dict[str, LengthController] = {str(k): FixedLength(k) for k in range(LONGEST + 1)}
        controllers[GOODPUT] = GoodputController(LONGEST, engine.costs)
        found[str(batch)] = _judged(rates_by_turns(engine, plain, controllers, prompts, batch, options.rounds, params))
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


def _judged(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Choose the best fixed length on odd rounds, and compare on the even ones."""
    best = best_of(rates, [str(k) for k in range(LONGEST + 1)])
    goodput = interval(ratios(rates, GOODPUT, best)[1::2])
    plain = interval(ratios(rates, PLAIN, NO_DRAFT))
    return {
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "times_plain": {name: interval(ratios(rates, name, PLAIN)) for name in rates},
        "best_length": int(best),
        "goodput_over_best": goodput,
        "plain_over_no_draft": plain,
        "met": {
            "goodput": goodput["mean"] >= GOALS["goodput"] and goodput["low"] >= GOALS["goodput_low"],
            "plain": plain["median"] >= GOALS["plain"],
        },
        "rounds": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
    }


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
