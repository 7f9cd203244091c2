"""Decision models: drafts that stop where a token would hardly be accepted, against lengths by goodput and fixed ones.

    distill train-stop draft.path=RUN
    python benchmarks/deciding.py --prompts math.jsonl --draft RUN/draft --stop STOP_RUN/draft [--batches 1 4]

After tables 3 and 4 of multi-candidate decoding (Yang et al. 2024). The sides take turns (`turns.py`): fixed lengths
from 0 to 6, goodput over chains, and chains of up to 8 tokens that end where the draft's own probability, or what the
network of `train-stop` predicts, falls below a threshold: each with 8 tokens always, and with lengths by goodput. The
best fixed length and threshold are chosen on the odd rounds and compared on the even ones. What the network reads
(`stop.reads`) is in the result. Writes `results/deciding.json`, with `stop.reads=state` `deciding_state.json`.
"""

from __future__ import annotations

from typing import Any

from common import write_result
from sides import make_engine
from turns import NO_DRAFT, Bench, Side, interval, shown, turn_options

from distillspec.config import TargetConfig
from distillspec.models import LanguageModel, load_target
from distillspec.recipes.rates import best_on_odd, ratios
from distillspec.serving import Engine
from distillspec.serving.base.controllers import LengthController
from distillspec.serving.base.fixed import FixedLength
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.draft_loading import load_draft

FIXED = range(7)
LONGEST = 8  # tokens of a chain that is stopped
THRESHOLDS = (0.3, 0.5)
GOODPUT = "goodput"
DECIDERS = ("probability", "network")


def main() -> None:
    options = turn_options(__doc__ or "", (1, 4), stop="")
    if not options.stop:
        raise SystemExit("--stop is needed: the draft that distill train-stop wrote")
    bench = Bench.prepare(options, LONGEST, controller="goodput", tree="off", prefix_reuse=True)
    engines = {
        f"{decider} {threshold}": _deciding(options, path, threshold)
        for decider, path in zip(DECIDERS, (options.draft, options.stop), strict=True)
        for threshold in THRESHOLDS
    }
    reads = network_reads(engines[f"network {THRESHOLDS[0]}"].draft)
    by_batch = {}
    for batch in options.batches:
        sides = {NO_DRAFT: Side(bench.plain), **{str(k): Side(bench.engine, FixedLength(k)) for k in FIXED}}
        sides[GOODPUT] = Side(bench.engine, _goodput(bench.engine))
        for name, engine in engines.items():
            sides[f"{name}, always"] = Side(engine, FixedLength(LONGEST))
            sides[f"{name}, goodput"] = Side(engine, _goodput(engine))
        by_batch[str(batch)] = _judged(bench.rates_of(sides, batch))
        print(f"batch {batch}: {by_batch[str(batch)]}", flush=True)
    result = {**bench.setting, "network_reads": reads, "thresholds": THRESHOLDS, "batch": by_batch}
    write_result("deciding" if reads == "probs" else f"deciding_{reads}", result)


def network_reads(draft: LanguageModel | None) -> str:
    """Return which signals a draft's network decides by, as `stop.reads` of `distill train-stop` named them.

    Raises:
        SystemExit: it has no network.
    """
    if draft is None or draft.stop_head is None:
        raise SystemExit("--stop names a draft without a network; give the one that distill train-stop wrote")
    return draft.stop_head.reads


def _deciding(options: Any, path: str, threshold: float) -> Engine:
    """Return an engine whose draft stops below a threshold."""
    target = load_target(TargetConfig(path=options.target, dtype=options.dtype))
    draft = load_draft(path, target)
    settings = {"controller": "goodput", "tree": "off", "draft_confidence": threshold, "prefix_reuse": True}
    return make_engine(options, target, draft, max(options.batches), speculation_length=LONGEST, **settings)


def _goodput(engine: Engine) -> LengthController:
    return GoodputController(LONGEST, engine.costs)


def _judged(rates: dict[str, list[float]]) -> dict[str, Any]:
    """Choose on odd rounds, and compare with the best fixed length on even ones."""
    fixed = best_on_odd(rates, [str(k) for k in FIXED])
    chosen = {GOODPUT: GOODPUT} | {
        f"{decider}, {how}": best_on_odd(rates, [f"{decider} {threshold}, {how}" for threshold in THRESHOLDS])
        for decider in DECIDERS
        for how in ("always", "goodput")
    }
    return {
        **shown(rates),
        "best_length": int(fixed),
        "chosen": chosen,
        "over_best_length": {name: interval(ratios(rates, side, fixed)[1::2]) for name, side in chosen.items()},
        "over_no_draft": {name: interval(ratios(rates, side, NO_DRAFT)[1::2]) for name, side in chosen.items()},
    }


if __name__ == "__main__":
    main()
