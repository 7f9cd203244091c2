"""`python -m distillspec.recipes.kinds --prompts FILE`: every kind of draft, on the same text, for the same minutes.

Run it again after an interruption: finished kinds are kept, and an interrupted one goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.recipes.arguments import add_common, check_prompts, names_of
from distillspec.recipes.distillspec.cells import resumable
from distillspec.recipes.kinds.elsewhere import cells, compared
from distillspec.recipes.kinds.results import figures_of, summary_of, write_results
from distillspec.recipes.kinds.study import FIRST, KINDS, Study


def main() -> int:
    study = _study()
    for kind in study.kinds:
        folder = study.folder(kind)
        if summary_of(folder) is None:
            code = distill(resumable([*study.command(kind), f"hydra.run.dir={folder}"], folder))
            if code:
                return code
        print(write_results(study), flush=True)
    kinds = compared(figures_of(study))
    for cell in cells(study):
        if summary_of(cell.folder(study)) is None:
            code = distill(cell.command(study, kinds))
            if code:
                return code
        print(write_results(study), flush=True)
    print(f"results: {study.root}")
    return 0


def _study() -> Study:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.kinds", description=__doc__)
    add_common(parser, "runs/study/kinds")
    parser.add_argument("--minutes", type=float, default=10.0, help="training, each kind")
    parser.add_argument("--text-minutes", type=float, default=10.0, help="writing text, once")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--elsewhere", type=files, default=(), help="prompt files that the best is judged on, A,B")
    parser.add_argument("--temperatures", type=numbers, default=(), help="other ones that it is judged at, as 0,0.7")
    options = parser.parse_args()
    if min(options.minutes, options.text_minutes) <= 0:
        parser.error("--minutes and --text-minutes must be above 0")
    check_prompts(parser, options.prompts)
    for file in options.elsewhere:
        check_prompts(parser, file, "--elsewhere")
    named = names_of(parser, "--kinds", options.kinds, KINDS)
    kinds = tuple(dict.fromkeys([FIRST, *named]))  # the first one writes the text
    words = tuple(options.words)
    return Study(
        Path(options.output),
        options.prompts,
        options.minutes,
        options.text_minutes,
        options.target,
        kinds,
        words,
        options.elsewhere,
        options.temperatures,
    )


def files(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
