"""`python -m distillspec.recipes.trees --prompts FILE --draft RUN`: tree shapes, lossy verification, joined sources.

Run it again after an interruption: finished runs are kept.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from distillspec.cli import main as distill
from distillspec.commands.drafts import find_draft
from distillspec.errors import ConfigError
from distillspec.models.checkpoint import read_metadata
from distillspec.recipes.arguments import add_common, check_prompts, names_of
from distillspec.recipes.runs import summary_of
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
    parser.add_argument("--further", action="append", default=[], help="another draft, for the cells of several")
    parser.add_argument("--medusa", default="", help="a draft of kind medusa, for its cells")
    parser.add_argument("--cells", help=f"of {', '.join(CELLS)}; default: all that there are drafts for")
    options = parser.parse_args()
    check_prompts(parser, options.prompts)
    if options.medusa:
        _check_heads(parser, options.medusa)
    return Study(
        root=Path(options.output),
        prompts=options.prompts,
        draft=options.draft,
        target=options.target,
        count=options.count,
        cells=_cells(parser, options),
        words=tuple(options.words),
        further=tuple(options.further),
        medusa=options.medusa,
    )


def _cells(parser: argparse.ArgumentParser, options: argparse.Namespace) -> tuple[str, ...]:
    """Return the cells that are named, or all that there are drafts for. A line says what the others need."""
    lacking = {name: cell.lacks(1 + len(options.further), options.medusa) for name, cell in CELLS.items()}
    if options.cells is not None:
        named = names_of(parser, "--cells", options.cells, CELLS)
        if short := [name for name in named if lacking[name]]:
            parser.error(f"--cells {short[0]} {lacking[short[0]]}")
        return named
    for name in filter(lacking.get, CELLS):
        print(f"--- {name} is left out: it {lacking[name]}", flush=True)
    return tuple([name for name in CELLS if not lacking[name]])


def _check_heads(parser: argparse.ArgumentParser, path: str) -> None:
    """End the program with exit code 2 if there is no draft of heads."""
    try:
        kind = read_metadata(find_draft(path))["lineage"].get("kind")
    except ConfigError as error:
        parser.error(f"--medusa: {error}")
    if kind != "medusa":
        parser.error(f"--medusa {path} is of kind {kind}; name one of kind medusa")


if __name__ == "__main__":
    sys.exit(main())
