"""Steps in micro-batches against whole ones: one is drafted on a core of its own while the target verifies another.

    python benchmarks/micro_batches.py --prompts math.jsonl --draft RUN/draft

Engines with chains of `--length` tokens take turns on the same running requests (`turns.py`): one without a draft, one
that drafts and then verifies, and one for each of `--counts`. Writes `results/micro_batches.json`.
"""

from __future__ import annotations

from typing import Any

from common import write_result
from sides import make_engine
from turns import NO_DRAFT, Bench, Side, interval, shown, turn_options

from distillspec.config import TargetConfig
from distillspec.models import load_target
from distillspec.recipes.rates import ratios
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.draft_loading import load_draft

WHOLE = "whole steps"


def main() -> None:
    options = turn_options(__doc__ or "", (4, 8), length=2, counts=["2", "4"])
    chains = {"speculation_length": options.length, "tree": "off", "prefix_reuse": True}
    bench = Bench.prepare(options, options.length, tree="off", prefix_reuse=True)
    sides = {NO_DRAFT: Side(bench.plain), WHOLE: Side(bench.engine, FixedLength(options.length))}
    for count in options.counts:
        target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
        draft = load_draft(options.draft, target)
        engine = make_engine(options, target, draft, max(options.batches), micro_batches=int(count), **chains)
        sides[f"{count} micro-batches"] = Side(engine)
    by_batch: dict[str, Any] = {}
    for batch in options.batches:
        rates = bench.rates_of(sides, batch)
        split = [name for name in rates if name not in (NO_DRAFT, WHOLE)]
        by_batch[str(batch)] = {
            **shown(rates),
            "over_whole_steps": {name: interval(ratios(rates, name, WHOLE)) for name in split},
            "over_no_draft": {name: interval(ratios(rates, name, NO_DRAFT)) for name in (WHOLE, *split)},
        }
        print(batch, by_batch[str(batch)]["over_whole_steps"], flush=True)
    write_result("micro_batches", {**bench.setting, "length": options.length, "batch": by_batch})


if __name__ == "__main__":
    main()
