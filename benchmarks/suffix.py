"""Earlier answers as drafts: suffixes or n-grams beside a draft model, against it alone, on prompts that come again.

    python benchmarks/suffix.py --draft RUN/draft --prompts sql.jsonl summarization.jsonl

Each prompt of a file is answered, and answered again when `--prompts-each` others have been. Engines take turns,
`--batch` prompts at a time: `proposer=draft_model`, and `suffix_else_model` and `[ngram,draft_model]`, which know the
first answers. Ratios are tokens a second over those of the draft alone, with 95 % intervals over groups of prompts
(Student's). Prompts are read anew each time. Writes `results/suffix.json`, or `results/suffix_<name>.json`.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from common import write_result
from sides import make_engine, rate_of, read_prompts
from turns import interval

from distillspec.config import TargetConfig
from distillspec.evaluation.measured import in_turn
from distillspec.models import load_target
from distillspec.serving import Engine, SamplingParams
from distillspec.serving.draft_loading import load_draft

GOAL = 1.3
ALONE = "draft_model"
SIDES: dict[str, str | list[str]] = {
    ALONE: ALONE,
    "suffix_else_model": "suffix_else_model",
    "ngram_and_draft": ["ngram", ALONE],
}


def main() -> None:
    options = _options()
    target = load_target(TargetConfig(path="smollm2", dtype=options.dtype))
    params = SamplingParams(temperature=options.temperature, max_tokens=options.tokens, ignore_eos=True)
    by_file: dict[str, Any] = {}
    for path in options.prompts:
        engines = {
            name: make_engine(
                options,
                target,
                load_draft(options.draft, target),
                options.batch,
                controller="goodput",
                proposer=proposer,
                speculation_length=options.speculation_length,
            )
            for name, proposer in SIDES.items()
        }
        prompts = read_prompts(path, target, options.prompts_each, longest=768)
        by_file[Path(path).stem] = _compare(engines, prompts, options.batch, params)
        print(Path(path).stem, by_file[Path(path).stem], flush=True)
        for engine in engines.values():
            engine.close()
    setting = {"prompts": options.prompts_each, "tokens": options.tokens, "temperature": options.temperature}
    met = {
        name: all(figures["second"][name]["mean"] >= GOAL for figures in by_file.values())
        for name in SIDES
        if name != ALONE
    }
    write_result(
        "suffix" + (f"_{options.name}" if options.name else ""),
        {**setting, "batch": options.batch, "goal": GOAL, "met": met, "files": by_file},
    )


def _compare(
    engines: dict[str, Engine], prompts: list[list[int]], batch: int, params: SamplingParams
) -> dict[str, Any]:
    groups = [prompts[first : first + batch] for first in range(0, len(prompts), batch)]
    rates: dict[str, list[list[float]]] = {name: [[], []] for name in SIDES}
    accepted: dict[str, list[float]] = {name: [] for name in SIDES}
    for pass_number in range(2):
        for number, group in enumerate(groups):
            for name in in_turn(SIDES, number):

                def answers(engine: Engine = engines[name], name: str = name, group: list[list[int]] = group) -> int:
                    outputs = engine.generate(group, params)
                    steps = sum(output.stats.steps for output in outputs)
                    accepted[name].append(sum(len(output.token_ids) for output in outputs) / steps)
                    return sum(len(output.token_ids) for output in outputs)

                rates[name][pass_number].append(rate_of(answers))
    ratios = {
        name: [
            [rate / alone_rate for rate, alone_rate in zip(of_side, of_alone, strict=True)]
            for of_side, of_alone in zip(side_rates, rates[ALONE], strict=True)
        ]
        for name, side_rates in rates.items()
        if name != ALONE
    }
    return {
        "first": {name: interval(side_ratios[0][1:]) for name, side_ratios in ratios.items()},
        "second": {name: interval(side_ratios[1]) for name, side_ratios in ratios.items()},
        "tokens_per_s": {name: [statistics.median(pass_rates) for pass_rates in rates[name]] for name in SIDES},
        "tokens_a_step": {name: statistics.fmean(tokens[len(tokens) // 2 :]) for name, tokens in accepted.items()},
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draft", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--name", default="", help="of the result")
    parser.add_argument("--prompts-each", type=int, default=52)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--speculation-length", type=int, default=8)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true", help="compile passes first")
    return parser.parse_args()


if __name__ == "__main__":
    main()
