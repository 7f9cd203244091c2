"""`python -m distillspec.recipes.distillspec --prompts FILE`: the whole grid, one cell after another.

Run it again after an interruption: finished cells are kept, the one that was cut off goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.recipes.distillspec.cells import resumable, run_cells
from distillspec.recipes.distillspec.grid import Study, data_command, initial_command, summary_of
from distillspec.recipes.distillspec.results import write_results


def main() -> int:
    study = _study()
    for source in ("teacher", "fixed"):
        if summary_of(study.data_folder(source)) is None:
            code = distill(resumable(data_command(study, source), study.data_folder(source)))
            if code:
                return code
    if summary_of(study.initial) is None:
        code = distill(initial_command(study))
        if code:
            return code
    code = run_cells(study, lambda: write_results(study))
    if code:
        return code
    print(write_results(study))
    print(f"results: {study.root}")
    return 0


def _study() -> Study:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.distillspec", description=__doc__)
    parser.add_argument("--prompts", required=True, help="JSON, JSONL, CSV or Parquet with prompt and response columns")
    parser.add_argument("--output", default="runs/study/distillspec", help="where everything goes")
    parser.add_argument("--minutes", type=float, default=3.0, help="training minutes a cell (24 cells)")
    parser.add_argument("--data-minutes", type=float, default=10.0, help="minutes of sampling, and of scoring")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--eval-prompts", type=int, default=48)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side, each with its share of the cores")
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    if options.minutes <= 0 or options.data_minutes <= 0:
        parser.error("--minutes and --data-minutes must be above 0")
    if not Path(options.prompts).is_file():
        parser.error(f"--prompts {options.prompts}: no such file")
    return Study(
        root=Path(options.output),
        prompts=options.prompts,
        minutes=options.minutes,
        data_minutes=options.data_minutes,
        target=options.target,
        vocabulary=options.vocabulary,
        num_prompts=options.num_prompts,
        eval_prompts=options.eval_prompts,
        max_new_tokens=options.max_new_tokens,
        jobs=options.jobs,
    )


if __name__ == "__main__":
    sys.exit(main())
