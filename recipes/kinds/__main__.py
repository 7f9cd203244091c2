"""`python -m distillspec.recipes.kinds --prompts FILE`: every kind of draft, on the same text, for the same minutes.

Run it again after an interruption: finished kinds are kept, and an interrupted one goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.composition import compose
from distillspec.models import load_target
from distillspec.models.features import default_state_ids
from distillspec.recipes.arguments import add_common, check_prompts, names_of
from distillspec.recipes.kinds.elsewhere import cells
from distillspec.recipes.kinds.results import figures_of, write_results
from distillspec.recipes.kinds.study import FIRST, KINDS, Study
from distillspec.recipes.runs import resumable, summary_of


def main() -> int:
    study = with_states(_study())
    for kind in study.kinds:
        if code := _run(study, study.command(kind), study.folder(kind)):
            return code
    for cell in cells(study, figures_of(study)):
        if code := _run(study, cell.command(study), cell.folder(study)):
            return code
    print(f"results: {study.root}")
    return 0


def _run(study: Study, command: list[str], folder: Path) -> int:
    """Run a command into its folder, unless it is done, and write the results so far. Return its exit code."""
    if summary_of(folder) is None:
        command = [*command, f"hydra.run.dir={folder}"]
        if code := distill(resumable(command, folder) if command[0] == "train" else command):
            return code
    print(write_results(study), flush=True)
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
    return Study(
        root=Path(options.output),
        prompts=options.prompts,
        minutes=options.minutes,
        text_minutes=options.text_minutes,
        target=options.target,
        kinds=kinds,
        words=tuple(options.words),
        elsewhere=options.elsewhere,
        temperatures=options.temperatures,
    )


def with_states(study: Study) -> Study:
    """Return the study with its text recorded with the states that heads read too.

    Else heads would spend their minutes on computing them. A study without heads records them too, since a later run
    may add heads.
    """
    if summary_of(study.folder(FIRST)) is not None:
        return study
    config = compose("train", study.command(FIRST)[1:])
    if config.data.generator != "slots" or config.data.state_ids is not None:
        return study
    target = load_target(config.target)
    return replace(study, states=(*default_state_ids(target), len(target.layers)))


def files(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def numbers(text: str) -> tuple[float, ...]:
    return tuple(map(float, text.split(",")))


if __name__ == "__main__":
    sys.exit(main())
