"""Trees against chains: shapes by goodput, lengths by goodput, fixed chains and fixed shapes, by batch size.

    python benchmarks/trees.py --prompts math.jsonl,chat.jsonl,code.jsonl --draft RUN/draft [--batches 1 2 4 8 16]
    python benchmarks/trees.py … --shapes topk-3-2 dynamic-8 fork-2x4 tree-2-2 [--chains none fixed-2 fixed-4]

The sides take turns (`turns.py`) on the same requests with answers of 256 tokens, one file of prompts after another.
Shapes are policies of `distill bench` (docs/trees.md). The tuned chain is the best fixed length, and the best shape the
best fixed one of chains and trees. Both are chosen on the odd rounds and compared with on the even ones. Writes
`results/trees.json`, with `--temperature 0` `trees_t0.json`, with `--name NAME` another.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import write_result
from turns import NO_DRAFT, Bench, interval, shown, turn_options

from distillspec.recipes.rates import best_on_odd, ratios
from distillspec.serving.baselines.named import named_controller

CHAINS = ["none", "fixed-1", "fixed-2", "fixed-3", "fixed-4"]
TREES = ["siblings-2-1", "siblings-3-2", "tree-2-2"]
GOODPUT, GOODPUT_CHAINS = "goodput", "goodput-chains"
Interval = dict[str, float]
# Trees by goodput over the tuned chain and over no draft by batch, and over the best fixed shape at every batch.
MANY = {"mean": 0.98, "low": 0.96}
GOALS: dict[str, dict[str, Interval]] = {
    "tuned_chain": {"1": {"mean": 1.10, "low": 1.03}, "4": {"low": 1.0}, "8": MANY, "16": MANY},
    "no_draft": {"1": {"mean": 1.7}, "8": {"mean": 1.25}},
    "best_shape": dict.fromkeys(("1", "2", "4", "8", "16"), MANY),
}


def main() -> None:
    own = {"chains": CHAINS, "shapes": TREES, "speculation_length": 4, "tree": "sampled", "name": ""}
    options = turn_options(__doc__ or "", (1, 2, 4, 8, 16), **own)
    files = options.prompts.split(",")
    settings = {"controller": "goodput", "tree": options.tree}
    options.prompts = files[0]
    bench = Bench.prepare(options, options.speculation_length, **settings)
    found: dict[str, Any] = {}
    for file in files:
        batches = found[Path(file).stem] = {}
        for batch in options.batches:
            batches[str(batch)] = _measured(bench.asking(file), batch)
            print(f"{file}, batch {batch}: {batches[str(batch)]}", flush=True)
    name = options.name or ("trees" if options.temperature else "trees_t0")
    write_result(name, {**bench.setting, **settings, "goals": GOALS, "files": found})


def _measured(bench: Bench, batch: int) -> dict[str, Any]:
    options, engine = bench.options, bench.engine
    names = [*options.chains, *options.shapes, GOODPUT, GOODPUT_CHAINS]
    rates = bench.rates(
        {
            name: named_controller(name, options.speculation_length, engine.costs, settings=engine.settings)
            for name in names
        },
        batch,
    )
    chain, tree = best_on_odd(rates, options.chains), best_on_odd(rates, options.shapes)
    shape = best_on_odd(rates, [chain, tree])
    times_no_draft = {name: interval(ratios(rates, name, NO_DRAFT)) for name in rates}
    over = {
        "tuned_chain": interval(ratios(rates, GOODPUT, chain)[1::2]),
        "best_shape": interval(ratios(rates, GOODPUT, shape)[1::2]),
        "no_draft": times_no_draft[GOODPUT],
    }
    return {
        **shown(rates),
        "times_no_draft": times_no_draft,
        "tuned_chain": chain,
        "best_tree": tree,
        "best_shape": shape,
        "trees_over_tuned_chain": over["tuned_chain"],
        "trees_over_goodput_chains": interval(ratios(rates, GOODPUT, GOODPUT_CHAINS)),
        "trees_over_best_shape": over["best_shape"],
        "best_tree_over_tuned_chain": interval(ratios(rates, tree, chain)[1::2]),
        "met": {
            against: all(over[against][end] >= least for end, least in by_batch[str(batch)].items())
            for against, by_batch in GOALS.items()
            if str(batch) in by_batch
        },
    }


if __name__ == "__main__":
    main()
