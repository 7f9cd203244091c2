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
from distillspec.recipes.trees.study import CELLS, Study


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
    parser.add_argument("--cells", default=",".join(CELLS), help=f"of {', '.join(CELLS)}")
    options = parser.parse_args()
    check_prompts(parser, options.prompts)
    named = names_of(parser, "--cells", options.cells, CELLS)
    words = tuple(options.words)
    return Study(Path(options.output), options.prompts, options.draft, options.target, options.count, named, words)


if __name__ == "__main__":
    sys.exit(main())
