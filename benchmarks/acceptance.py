"""Held-out acceptance after so many minutes of training: `distill train experiment=ten-minutes`.

    python benchmarks/acceptance.py --prompts math.jsonl [--minutes 10] [--work runs/benchmark]

Reads the run's own `summary.json`. `--minutes 60` trains longer on the same ten minutes of text. `--data RUN` takes the
text of an earlier run, `--first RUN` its draft too: training goes on from there, and its minutes count.
`--compare RUN RUN` writes the figures of two runs side by side, that differ in their loss.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from common import write_result
from omegaconf import DictConfig, OmegaConf

from distillspec.cli import main as distill
from distillspec.data.folder import find_data_folder
from distillspec.data.shards import read_samples

GOALS = {10: 0.50, 60: 0.58}  # minutes of training → α
COST_LIMIT = 0.13  # draft step / target step
PRESET_MINUTES = 10


def main() -> int:
    options = read_options()
    if options.compare:
        write_result("acceptance_losses", {"runs": [_compared(run) for run in options.compare]})
        return 0
    run = options.work / f"train-{options.minutes:g}"
    if not (run / "summary.json").is_file():
        code = distill(["train", *train_words(options), f"hydra.run.dir={run}"])
        if code:
            return code
    write_result(f"acceptance_{options.minutes:g}min", _result(run, options))
    return 0


def train_words(options: argparse.Namespace) -> list[str]:
    """Return the settings of `distill train`: the preset, the prompts, and what the options change of it."""
    words = ["experiment=ten-minutes", f"data.prompts={options.prompts}"]
    data = options.data or options.first
    if data is not None:
        words = ["experiment=ten-minutes", f"data.cache={data}"]
    if options.first is not None:
        words += [
            "draft=pretrained",
            f"draft.path={options.first / 'draft'}",
            "draft.layers=null",
            "draft.vocabulary=null",
        ]
    minutes = options.minutes - _minutes_before(options)
    if minutes != PRESET_MINUTES:
        words.append(f"train.max_minutes={minutes:g}")
    return [*words, *options.overrides]


def _minutes_before(options: argparse.Namespace) -> float:
    return 0.0 if options.first is None else json.loads((options.first / "summary.json").read_text())["minutes"]


def _result(run: Path, options: argparse.Namespace) -> dict:
    trained, config = json.loads((run / "summary.json").read_text()), OmegaConf.load(run / "config.yaml")
    after = trained["after"]
    cost = after["cost"]["1"]["c"]
    goal = GOALS.get(int(options.minutes))
    return {
        "minutes": trained["minutes"] + _minutes_before(options),
        "minutes_before": _minutes_before(options),
        "draft": {
            "layers": config.draft.layers,
            "vocabulary": config.draft.vocabulary,
            "overrides": options.overrides,
        },
        "generated": _generated(run, config),
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


def _compared(run: Path) -> dict:
    """Return what tells two runs apart, and what came of them."""
    trained, config = json.loads((run / "summary.json").read_text()), OmegaConf.load(run / "config.yaml")
    provenance = json.loads((run / "provenance.json").read_text())
    figures = {name: trained["after"][name] for name in ("alpha", "tau", "greedy_agreement")}
    return {
        "loss": OmegaConf.to_container(config.loss),
        "steps": trained["steps"],
        "tokens": trained["tokens"],
        "minutes": trained["minutes"],
        "generated": _generated(run, config),
        **figures,
        "commit": provenance["git_commit"],
    }


def _generated(run: Path, config: DictConfig) -> dict[str, int]:
    """Count the text that the run learnt from."""
    samples = read_samples(find_data_folder(config.data.cache or str(run)).samples)
    return {"samples": len(samples), "response_tokens": sum(len(sample.response_ids) for sample in samples)}


def read_options(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the options of this command. Default: those it was called with."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", help="JSON Lines; needed unless runs are compared")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--data", type=Path, help="an earlier run, whose text to train on")
    parser.add_argument("--first", type=Path, help="an earlier run, whose draft to go on with")
    parser.add_argument("--compare", type=Path, nargs=2, metavar="RUN", help="two finished runs")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("overrides", nargs="*", help="more settings for distill train")
    options = parser.parse_args(words)
    if options.prompts is None and options.compare is None:
        parser.error("--prompts FILE is needed")
    return options


if __name__ == "__main__":
    sys.exit(main())
