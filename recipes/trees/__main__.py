"""`python -m distillspec.recipes.trees --prompts FILE --draft RUN`: tree shapes, lossy verification, joined sources.

Run it again after an interruption: finished runs are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.recipes.arguments import add_common, check_prompts, names_of
from distillspec.recipes.kinds.results import summary_of
from distillspec.recipes.trees.results import write_results
from distillspec.recipes.trees.study import CELLS, Study, able


def main() -> int:
    study = _study()
    for name in study.cells:
        if summary_of(study.folder(name)) is None:
            print(f"--- {name}", flush=True)
            code = distill(study.command(name))
            if code:
                return code
    print(write_results(study), flush=True)
    print(f"results: {study.root}")
    return 0


def _study() -> Study:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.trees", description=__doc__)
    add_common(parser, "runs/study/trees")
    parser.add_argument("--draft", required=True, help="a run or folder with a draft")
    parser.add_argument("--count", type=int, default=64, help="prompts of each run")
    parser.add_argument("--further", action="append", default=[], help="another draft, for the cells of several")
    parser.add_argument("--cells", help=f"of {', '.join(CELLS)}; default: all that the drafts are enough for")
    options = parser.parse_args()
    check_prompts(parser, options.prompts)
    enough = able(1 + len(options.further))
    named = names_of(parser, "--cells", ",".join(enough) if options.cells is None else options.cells, CELLS)
    if short := [name for name in named if name not in enough]:
        parser.error(f"--cells {short[0]} needs {CELLS[short[0]].drafts} drafts; name the others with --further RUN")
    given = (options.prompts, options.draft, options.target, options.count)
    return Study(Path(options.output), *given, named, tuple(options.words), tuple(options.further))


if __name__ == "__main__":
    sys.exit(main())
