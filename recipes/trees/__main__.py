"""`python -m distillspec.recipes.trees --prompts FILE --draft RUN`: tree shapes, lossy verification, joined sources.

Run it again after an interruption: finished runs are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.recipes.trees.results import is_done, write_results
from distillspec.recipes.trees.study import CELLS, Study


def main() -> int:
    study = _study()
    for name in study.cells:
        if not is_done(study, name):
            print(f"--- {name}", flush=True)
            code = distill(study.command(name))
            if code:
                return code
    print(write_results(study), flush=True)
    print(f"results: {study.root}")
    return 0


def _study() -> Study:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.trees", description=__doc__)
    parser.add_argument("--prompts", required=True, help="JSON, JSONL, CSV or Parquet with a prompt column")
    parser.add_argument("--draft", required=True, help="a run or folder with a draft")
    parser.add_argument("--output", default="runs/study/trees", help="where everything goes")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--count", type=int, default=64, help="prompts of each run")
    parser.add_argument("--cells", default=",".join(CELLS), help=f"of {', '.join(CELLS)}")
    parser.add_argument("words", nargs="*", help="further settings of every run")
    options = parser.parse_args()
    if not Path(options.prompts).is_file():
        parser.error(f"--prompts {options.prompts}: no such file")
    named = tuple(dict.fromkeys(options.cells.split(",")))
    if unknown := [name for name in named if name not in CELLS]:
        parser.error(f"--cells {unknown[0]} is not known; use some of {', '.join(CELLS)}")
    words = tuple(options.words)
    return Study(Path(options.output), options.prompts, options.draft, options.target, options.count, named, words)


if __name__ == "__main__":
    sys.exit(main())
