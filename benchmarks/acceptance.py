"""Held-out acceptance after so many minutes of training on ten minutes of teacher-sampled data.

    python benchmarks/acceptance.py --prompts math.jsonl --minutes 10 [--work runs/benchmark]

Drives the command line as a user would: `distill generate` once, `distill train` on its data, and reads the run's
own `summary.json`. With `--first RUN` training goes on from that run's draft, and its minutes count.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from common import write_result

from distillspec.cli import main as distill

GOALS = {10: 0.50, 60: 0.58}  # minutes of training → α
COST_LIMIT = 0.13  # draft step / target step


def main() -> int:
    options = _options()
    data, run = options.work / "data", options.work / f"train-{options.minutes:g}"
    if not (data / "summary.json").is_file():
        code = distill(
            [
                "generate",
                f"data.prompts={options.prompts}",
                "data.num_prompts=4000",
                "data.batch_slots=96",
                f"data.max_minutes={options.data_minutes:g}",
                f"hydra.run.dir={data}",
            ]
        )
        if code:
            return code
    if not (run / "summary.json").is_file():
        code = distill(["train", f"data.cache={data}", *_draft(options), *options.overrides, f"hydra.run.dir={run}"])
        if code:
            return code
    write_result(f"acceptance_{options.minutes:g}min", _result(data, run, options))
    return 0


def _draft(options: argparse.Namespace) -> list[str]:
    """What to train, and for how long."""
    if options.first is None:
        cut = [f"draft.layers={options.layers}", f"draft.vocabulary={options.vocabulary}"]
        return [*cut, f"train.max_minutes={options.minutes:g}"]
    left = options.minutes - _minutes_before(options)
    return ["draft=pretrained", f"draft.path={options.first / 'draft'}", f"train.max_minutes={left:g}"]


def _minutes_before(options: argparse.Namespace) -> float:
    return 0.0 if options.first is None else json.loads((options.first / "summary.json").read_text())["minutes"]


def _result(data: Path, run: Path, options: argparse.Namespace) -> dict:
    made, trained = (json.loads((folder / "summary.json").read_text()) for folder in (data, run))
    after = trained["after"]
    cost = after["cost"]["1"]["c"]
    goal = GOALS.get(int(options.minutes))
    return {
        "minutes": trained["minutes"] + _minutes_before(options),
        "minutes_before": _minutes_before(options),
        "draft": {"layers": options.layers, "vocabulary": options.vocabulary, "overrides": options.overrides},
        "generated": {k: made[k] for k in ("samples", "response_tokens", "seconds")},
        "alpha": after["alpha"],
        "alpha_before": trained["before"]["alpha"],
        "tau": after["tau"],
        "ceiling": after["ceiling"],
        "greedy_agreement": after["greedy_agreement"],
        "p_of_draft_argmax": after["p_of_draft_argmax"],
        "tokens": trained["tokens"],
        "tokens_per_s": trained["tokens_per_s"],
        "cost": after["cost"],
        "speedup": after["speedup"],
        "goals": {"alpha": goal, "cost": COST_LIMIT},
        "met": {"alpha": None if goal is None else after["alpha"]["mean"] >= goal, "cost": cost <= COST_LIMIT},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--data-minutes", type=float, default=10.0)
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--first", type=Path, help="an earlier run, whose draft to go on with")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("overrides", nargs="*", help="more settings for distill train")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
