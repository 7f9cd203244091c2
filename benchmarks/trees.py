"""Trees against chains: shapes by goodput, lengths by goodput, fixed chains and fixed shapes, by batch size.

    python benchmarks/trees.py --prompts math.jsonl,chat.jsonl,code.jsonl --draft RUN/draft [--batches 1 2 4 8 16]
    python benchmarks/trees.py … --shapes topk-3-2 dynamic-8 fork-2x4 tree-2-2 [--chains none fixed-2 fixed-4]

The sides take turns (`turns.py`) on the same requests with answers of 256 tokens, one file of prompts after another.
Shapes are policies of `distill bench` (docs/trees.md). The tuned chain is the best fixed length, and the best shape the
best fixed one of chains and trees. Both are chosen in the first half of the rounds, and take turns with goodput over
shapes, goodput over chains and no draft in the second half. Writes
`results/trees.json`, with `--temperature 0` `trees_t0.json`, with `--name NAME` another.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common import write_result
from turns import NO_DRAFT, Bench, interval, shown, turn_options

from distillspec.recipes.rates import best_of, ratios
from distillspec.serving.baselines.by_name import named_controller

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
    defaults = {"chains": CHAINS, "shapes": TREES, "speculation_length": 4, "tree": "sampled", "name": ""}
    options = turn_options(__doc__ or "", (1, 2, 4, 8, 16), **defaults)
    files = options.prompts.split(",")
    settings = {"controller": "goodput", "tree": options.tree}
    options.prompts = files[0]
    bench = Bench.prepare(options, options.speculation_length, **settings)
    by_file: dict[str, Any] = {}
    for file in files:
        batches = by_file[Path(file).stem] = {}
        for batch in options.batches:
            batches[str(batch)] = _measured(bench.asking(file), batch)
            print(f"{file}, batch {batch}: {batches[str(batch)]}", flush=True)
    name = options.name or ("trees" if options.temperature else "trees_t0")
    write_result(name, {**bench.setting, **settings, "goals": GOALS, "files": by_file})


def _measured(bench: Bench, batch: int) -> dict[str, Any]:
    """Choose the best fixed shapes in half of the rounds, and compare in the others."""
    options, engine = bench.options, bench.engine
    choosing, comparing = bench.halves(batch)

    def rates_of(names: Sequence[str], prompts: Sequence[Sequence[int]]) -> dict[str, list[float]]:
        controllers = {
            name: named_controller(name, options.speculation_length, engine.costs, settings=engine.settings)
            for name in names
        }
        return bench.rates(controllers, batch, prompts)

    chosen = rates_of([*options.chains, *options.shapes], choosing)
    chain, tree = best_of(chosen, options.chains), best_of(chosen, options.shapes)
    shape = best_of(chosen, [chain, tree])
    rates = rates_of([chain, tree, GOODPUT, GOODPUT_CHAINS], comparing)
    times_no_draft = {name: interval(ratios(rates, name, NO_DRAFT)) for name in rates}
    over = {
        "tuned_chain": interval(ratios(rates, GOODPUT, chain)),
        "best_shape": interval(ratios(rates, GOODPUT, shape)),
        "no_draft": times_no_draft[GOODPUT],
    }
    return {
        "choosing": shown(chosen),
        "tuned_chain": chain,
        "best_tree": tree,
        "best_shape": shape,
        **shown(rates),
        "times_no_draft": times_no_draft,
        "trees_over_tuned_chain": over["tuned_chain"],
        "trees_over_goodput_chains": interval(ratios(rates, GOODPUT, GOODPUT_CHAINS)),
        "trees_over_best_shape": over["best_shape"],
        "best_tree_over_tuned_chain": interval(ratios(rates, tree, chain)),
        "met": {
            against: all(over[against][end] >= least for end, least in by_batch[str(batch)].items())
            for against, by_batch in GOALS.items()
            if str(batch) in by_batch
        },
    }


if __name__ == "__main__":
    main()
