"""`python -m distillspec.recipes.spin --prompts A,B --drafts D,E`: selections among several drafts, compared.

The name of a prompt file is its domain. Each selection answers the same prompts by turns. Without prompts and drafts
only the simulated part runs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from distillspec.commands.drafts import find_drafts
from distillspec.errors import ConfigError, RunError
from distillspec.recipes.spin.live import Live
from distillspec.recipes.spin.regret import LEAST
from distillspec.recipes.spin.results import write_results
from distillspec.recipes.spin.sides import COMPARED
from distillspec.recipes.spin.simulated import Simulated
from distillspec.serving.draft_loading import draft_names


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.spin", description=__doc__)
    parser.add_argument("--prompts", default="", help="JSONL files with a prompt column, A,B")
    parser.add_argument("--drafts", default="", help="runs or folders with drafts, A,B")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--output", default="runs/study/spin", help="where everything goes")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--each", type=int, default=4, help="prompts of every domain a round")
    parser.add_argument("--alone", type=int, help="rounds of each domain alone at batches above 1, as many by default")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer")
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--selections", nargs="*", default=COMPARED, choices=COMPARED, help="to compare goodput with")
    parser.add_argument(
        "--parts", action="store_true", help="SPIN's parts live too, at the largest batch: six sides more"
    )
    parser.add_argument("--recorded", type=int, default=24, help="prompts of every domain for regret on own answers")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="of the simulated part")
    parser.add_argument("--jobs", type=int, default=1, help="processes of the simulated part, side by side")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    root = Path(options.output)
    live, drafts = dict[str, Any](), list[str]()
    if options.prompts or options.drafts:
        _check_live(parser, options)
        live, drafts = _live(parser, options, root / "live.json")
    simulated = Simulated(tuple(options.rows)).run(root / "simulated.json", options.jobs)
    print(write_results(root, live, simulated, draft_names(drafts)), flush=True)
    print(f"results: {root}")
    return 0


def _check_live(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End the program with exit code 2 if the live part cannot run so."""
    if not (options.prompts and options.drafts):
        parser.error("the live part needs both --prompts and --drafts")
    if options.alone is None:
        options.alone = options.rounds
    least = {"rounds": 1, "each": 1, "tokens": 1, "alone": 0, "recorded": 0}
    for name, minimum in least.items():
        if getattr(options, name) < minimum:
            parser.error(f"--{name} {getattr(options, name)} must be at least {minimum}")
    if options.parts and max(options.batches) == 1:
        parser.error("--parts needs a batch above 1: one row has nothing to pad")
    options.prompts = [Path(name) for name in options.prompts.split(",")]
    if 0 < options.recorded * len(options.prompts) < LEAST:
        parser.error(f"--recorded {options.recorded}: regret needs {LEAST} answers in all, or 0 for none")
    if missing := [file for file in options.prompts if not file.is_file()]:
        parser.error(f"--prompts {missing[0]}: no such file")


def _live(parser: argparse.ArgumentParser, options: argparse.Namespace, file: Path) -> tuple[dict[str, Any], list[str]]:
    """Return the results of the live part, and its draft folders."""
    try:
        drafts = [str(folder) for folder in find_drafts(options.drafts.split(","))]
        live = Live(
            target=options.target,
            files=options.prompts,
            drafts=drafts,
            batches=options.batches,
            rounds=options.rounds,
            each=options.each,
            alone=options.alone,
            tokens=options.tokens,
            temperature=options.temperature,
            selections=options.selections,
            parts=options.parts,
            recorded=options.recorded,
        )
        return live.run(file), drafts
    except (ConfigError, RunError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
