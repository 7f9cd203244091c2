"""`python -m distillspec.recipes.distillspec --prompts FILE`: the whole grid, one cell after another.

Run it again after an interruption: finished cells are kept, and an interrupted one goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.recipes.distillspec.cells import run_cells
from distillspec.recipes.distillspec.grid import Study, cut_command, data_command, initial_command
from distillspec.recipes.distillspec.results import write_results
from distillspec.recipes.runs import resumable, summary_of


def main() -> int:
    study = _study()
    for folder, command in _preparations(study):
        if summary_of(folder) is None:
            code = distill(resumable(command, folder))
            if code:
                return code
    code = run_cells(study, lambda: write_results(study))
    if code:
        return code
    print(write_results(study))
    print(f"results: {study.root}")
    return 0


def _preparations(study: Study) -> list[tuple[Path, list[str]]]:
    """Return (folder, command) of what all cells share: both kinds of samples, and the initial draft."""
    samples = [(study.data_folder(source), data_command(study, source)) for source in ("teacher", "fixed")]
    return [*samples, (study.cut, cut_command(study)), (study.initial, initial_command(study))]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.distillspec", description=__doc__)
    parser.add_argument("--prompts", required=True, help="JSON, JSONL, CSV or Parquet with prompt and response columns")
    parser.add_argument("--output", default="runs/study/distillspec", help="where everything goes")
    parser.add_argument("--tokens", type=int, default=100_000, help="response tokens a cell trains on (24 cells)")
    parser.add_argument("--warm-tokens", type=int, default=200_000, help="fine-tuning before all cells")
    parser.add_argument("--data-minutes", type=float, default=10.0, help="minutes of sampling, and of scoring")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--eval-prompts", type=int, default=60)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side, each with its share of the cores")
    return parser


def _study() -> Study:
    parser = _parser()
    options = parser.parse_args()
    if options.jobs < 1:
        parser.error(f"--jobs {options.jobs} must be at least 1")
    if min(options.tokens, options.warm_tokens, options.data_minutes) <= 0:
        parser.error("--tokens, --warm-tokens and --data-minutes must be above 0")
    if not Path(options.prompts).is_file():
        parser.error(f"--prompts {options.prompts}: no such file")
    return Study(
        root=Path(options.output),
        prompts=options.prompts,
        tokens=options.tokens,
        warm_tokens=options.warm_tokens,
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
