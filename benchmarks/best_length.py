"""Lengths by goodput against every fixed length, by batch size, live in one process.

    python benchmarks/best_length.py --prompts math.jsonl --draft RUN/draft [--batches 1 2 4 8 16]

The sides take turns (`turns.py`) with answers of 256 tokens: fixed lengths from 0 to 4 and an engine without a draft,
with as many slots as the largest batch. The best fixed length is chosen in the first half of the rounds. In the second
half it takes turns with length 0, no draft, and `controller=goodput` over chains, which begins with the costs that the
engine has measured at its start, and goes on with what it learns. All its turns count. Writes
`results/best_length.json`, with `--temperature 0` `best_length_t0.json`, with `--name NAME` another.
"""

from __future__ import annotations

from typing import Any

from common import write_result
from turns import NO_DRAFT, Bench, interval, shown, turn_options

from distillspec.recipes.rates import best_of, ratios
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController

LONGEST = 4
PLAIN, GOODPUT = "0", "goodput"
# Goodput over the best fixed length, its lower end, and tokens/s at length 0 over those without a draft.
GOALS = {"goodput": 0.98, "goodput_low": 0.96, "plain": 0.97}


def main() -> None:
    options = turn_options(__doc__ or "", (1, 2, 4, 8, 16), name="")
    bench = Bench.prepare(options, LONGEST, controller="goodput", tree="off")
    by_batch = {}
    for batch in options.batches:
        by_batch[str(batch)] = _measured(bench, batch)
        print(f"batch {batch}: {by_batch[str(batch)]}", flush=True)
    name = options.name or ("best_length" if options.temperature else "best_length_t0")
    write_result(name, {**bench.setting, "goals": GOALS, "batch": by_batch})


def _measured(bench: Bench, batch: int) -> dict[str, Any]:
    """Choose the best fixed length in half of the rounds, and compare in the others."""
    choosing, comparing = bench.halves(batch)
    fixed: dict[str, LengthController] = {str(k): FixedLength(k) for k in range(LONGEST + 1)}
    chosen = bench.rates(fixed, batch, choosing)
    best = best_of(chosen, list(fixed))
    sides = {PLAIN: fixed[PLAIN], best: fixed[best], GOODPUT: GoodputController(LONGEST, bench.engine.costs)}
    rates = bench.rates(sides, batch, comparing)
    goodput = interval(ratios(rates, GOODPUT, best))
    plain = interval(ratios(rates, PLAIN, NO_DRAFT))
    return {
        "choosing": shown(chosen),
        "best_length": int(best),
        **shown(rates),
        "times_plain": {name: interval(ratios(rates, name, PLAIN)) for name in rates},
        "goodput_over_best": goodput,
        "plain_over_no_draft": plain,
        "met": {
            "goodput": goodput["mean"] >= GOALS["goodput"] and goodput["low"] >= GOALS["goodput_low"],
            "plain": plain["median"] >= GOALS["plain"],
        },
    }


if __name__ == "__main__":
    main()
