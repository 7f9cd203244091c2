"""Trees against chains: shapes by goodput, lengths by goodput, fixed chains and fixed shapes, by batch size.

    python benchmarks/trees.py --prompts math.jsonl --draft RUN/draft [--batches 1 4 8 16] [--temperature 0]

The sides take turns (`turns.py`) on the same requests with answers of 256 tokens. The tuned chain is the best fixed
length, and the best shape the best fixed one of chains and trees. Both are chosen on the odd rounds and compared with
on the even ones. Writes `results/trees.json`, with `--temperature 0` `trees_t0.json`, with `--name NAME` another.
"""

from __future__ import annotations

from typing import Any

from common import write_result
from turns import NO_DRAFT, Bench, interval, shown, turn_options

from distillspec.recipes.rates import best_on_odd, ratios
from distillspec.serving.baselines.named import named_controller

CHAINS = ("none", "fixed-1", "fixed-2", "fixed-3", "fixed-4")
TREES = ("siblings-2-1", "siblings-3-2", "tree-2-2")
GOODPUT = ("goodput", "goodput-chains")
# Shapes by goodput: over the tuned chain in one row (mean, lower end) and in many (lower end), and over the best shape.
GOALS = {"one_row": 1.10, "one_row_low": 1.03, "low": 0.96, "shape": 0.98, "shape_low": 0.96}


def main() -> None:
    options = turn_options(__doc__ or "", (1, 4, 8, 16), speculation_length=4, tree="sampled", name="")
    settings = {"controller": "goodput", "tree": options.tree}
    bench, longest = Bench.prepare(options, options.speculation_length, **settings), options.speculation_length
    found = {}
    for batch in options.batches:
        names = [*CHAINS, *TREES, *GOODPUT]
        controllers = {name: named_controller(name, longest, bench.engine.costs) for name in names}
        found[str(batch)] = _judged(bench.rates(controllers, batch))
        print(f"batch {batch}: {found[str(batch)]}", flush=True)
    name = options.name or ("trees" if options.temperature else "trees_t0")
    write_result(name, {**bench.setting, **settings, "goals": GOALS, "batch": found})


def _judged(rates: dict[str, list[float]]) -> dict[str, Any]:
    chain, shape = best_on_odd(rates, list(CHAINS)), best_on_odd(rates, [*CHAINS, *TREES])
    return {
        **shown(rates),
        "times_no_draft": {name: interval(ratios(rates, name, NO_DRAFT)) for name in rates},
        "tuned_chain": chain,
        "best_shape": shape,
        "trees_over_tuned_chain": interval(ratios(rates, "goodput", chain)[1::2]),
        "trees_over_goodput_chains": interval(ratios(rates, "goodput", "goodput-chains")),
        "trees_over_best_shape": interval(ratios(rates, "goodput", shape)[1::2]),
    }


if __name__ == "__main__":
    main()
