"""Trees against chains: shapes by goodput, lengths by goodput, fixed chains and fixed shapes, by batch size.

    python benchmarks/trees.py --prompts math.jsonl --draft RUN/draft [--batches 1 4 8 16] [--temperature 0]

The sides take turns (`turns.py`) on the same requests with answers of 256 tokens. The tuned chain is the best fixed
length, and the best shape the best fixed one of chains and trees. Both are chosen on the odd rounds and compared with
on the even ones. Writes `results/trees.json`, with `--temperature 0` `trees_t0.json`.
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
from distillspec.serving.control.named import named_controller
from distillspec.serving.draft_loading import load_draft

TOKENS = 256  # of an answer
CHAINS = ("none", "fixed-1", "fixed-2", "fixed-3")
TREES = ("siblings-2-1", "siblings-3-2", "tree-2-2")
GOODPUT = ("goodput", "goodput-chains")
# Shapes by goodput: over the tuned chain in one row (mean, lower end) and in many (lower end), and over the best shape.
GOALS = {"one_row": 1.10, "one_row_low": 1.03, "low": 0.96, "shape": 0.98, "shape_low": 0.96}


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    alone = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    draft = load_draft(options.draft, target)
    most, longest = max(options.batches), options.speculation_length
    count = prompts_needed(options.rounds, options.batches)
    prompts = read_prompts(options.prompts, target, count, without=trained_prompts(draft.lineage))
    settings = {"controller": "goodput", "tree": options.tree}
    engine = make_engine(options, target, draft, most, speculation_length=longest, **settings)
    plain = make_engine(options, alone, None, most)
    params = SamplingParams(temperature=options.temperature, max_tokens=TOKENS, ignore_eos=True)
    found = {}
    for batch in options.batches:
        names = [*CHAINS, *TREES, *GOODPUT]
        controllers = {name: named_controller(name, longest, engine.costs) for name in names}
        found[str(batch)] = _judged(rates_by_turns(engine, plain, controllers, prompts, batch, options.rounds, params))
        print(f"batch {batch}: {found[str(batch)]}", flush=True)
    machine = {"dtype": str(target.dtype), "threads": torch.get_num_threads(), "draft": draft.kind, **settings}
    setting = {"tokens": TOKENS, "steps_a_turn": TURN, "temperature": options.temperature, "rounds": options.rounds}
    name = "trees" if options.temperature else "trees_t0"
    write_result(name, {**machine, **setting, "goals": GOALS, "batch": found})


def _judged(rates: dict[str, list[float]]) -> dict[str, Any]:
    chain, shape = best_of(rates, list(CHAINS)), best_of(rates, [*CHAINS, *TREES])
    return {
        "tokens_per_s": {name: statistics.median(found) for name, found in rates.items()},
        "times_no_draft": {name: interval(ratios(rates, name, NO_DRAFT)) for name in rates},
        "tuned_chain": chain,
        "best_shape": shape,
        "trees_over_tuned_chain": interval(ratios(rates, "goodput", chain)[1::2]),
        "trees_over_goodput_chains": interval(ratios(rates, "goodput", "goodput-chains")),
        "trees_over_best_shape": interval(ratios(rates, "goodput", shape)[1::2]),
        "rounds": {name: [round(rate, 2) for rate in found] for name, found in rates.items()},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--speculation-length", type=int, default=4)
    parser.add_argument("--tree", default="sampled")
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    options = parser.parse_args()
    if options.rounds < 4:
        parser.error(f"--rounds {options.rounds}: two odd and two even ones are needed, so at least 4")
    return options


if __name__ == "__main__":
    main()
