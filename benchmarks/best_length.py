"""Lengths by goodput against every fixed length, by batch size, live in one process.

    python benchmarks/best_length.py --prompts math.jsonl --draft RUN/draft [--batches 1 2 4 8 16]

The sides take turns (`turns.py`) with answers of 256 tokens: fixed lengths from 0 to 4, `controller=goodput` over
chains with the costs that the engine has measured at its start, and an engine without a draft. Both engines have as
many slots as the largest batch. Goodput goes on with what it has learnt, and all its turns count. The best fixed length
is chosen on the odd rounds and compared on the even ones. Writes `results/best_length.json`, with `--temperature 0`
`best_length_t0.json`.
"""

from __future__ import annotations

from typing import Any

from common import write_result
from turns import NO_DRAFT, Bench, interval, shown, turn_options

from distillspec.recipes.rates import best_on_odd, ratios
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController

LONGEST = 4
PLAIN, GOODPUT = "0", "goodput"
# Goodput over the best fixed length, its lower end, and tokens/s at length 0 over those without a draft.
GOALS = {"goodput": 0.98, "goodput_low": 0.96, "plain": 0.97}


def main() -> None:
    options = turn_options(__doc__ or "", (1, 2, 4, 8, 16))
    bench = Bench.prepare(options, LONGEST, controller="goodput", tree="off")
    found = {}
    for batch in options.batches:
        controllers: dict[str, LengthController] = {str(k): FixedLength(k) for k in range(LONGEST + 1)}
        controllers[GOODPUT] = GoodputController(LONGEST, bench.engine.costs)
        found[str(batch)] = _judged(bench.rates(controllers, batch))
        print(f"batch {batch}: {found[str(batch)]}", flush=True)
    name = "best_length" if options.temperature else "best_length_t0"
    write_result(name, {**bench.setting, "goals": GOALS, "batch": found})


def _judged(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Choose the best fixed length on odd rounds, and compare on the even ones."""
    best = best_on_odd(rates, [str(k) for k in range(LONGEST + 1)])
    goodput = interval(ratios(rates, GOODPUT, best)[1::2])
    plain = interval(ratios(rates, PLAIN, NO_DRAFT))
    return {
        **shown(rates),
        "times_plain": {name: interval(ratios(rates, name, PLAIN)) for name in rates},
        "best_length": int(best),
        "goodput_over_best": goodput,
        "plain_over_no_draft": plain,
        "met": {
            "goodput": goodput["mean"] >= GOALS["goodput"] and goodput["low"] >= GOALS["goodput_low"],
            "plain": plain["median"] >= GOALS["plain"],
        },
    }


if __name__ == "__main__":
    main()
