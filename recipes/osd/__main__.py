"""`python -m distillspec.recipes.osd --draft FOLDER --segments math=FILE code=FILE … math`: stream, arms, tables.

Run it again after an interruption: recorded requests and finished arms and cells are kept.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import transformers

from distillspec.config import TargetConfig
from distillspec.errors import ConfigError, RunError
from distillspec.files import write_json
from distillspec.models import LanguageModel, load_draft, load_target
from distillspec.recipes.osd.arms import ARMS, VERIFIED, arms, first_version, run_arm
from distillspec.recipes.osd.bias import share_of_room
from distillspec.recipes.osd.grid import fill_grid
from distillspec.recipes.osd.held_out import HeldOutSets, Rows
from distillspec.recipes.osd.offline import distil_offline
from distillspec.recipes.osd.results import write_results
from distillspec.recipes.osd.stores import Store
from distillspec.recipes.osd.stream import Stream, read_stream, record
from distillspec.recipes.osd.study import Study, parse_segments

PARTS = ("record", "arms", "offline", "grid")
USUAL = [name for name in ARMS if name != VERIFIED]
STATIC = ARMS[0]  # the baseline of all comparisons


def main() -> int:
    try:
        options = _options()
        return _run(_study(options), options.parts, {STATIC, *options.arms})
    except (ConfigError, RunError) as error:
        print(f"osd: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(study: Study, parts: list[str], names: set[str]) -> int:
    transformers.utils.logging.disable_progress_bar()
    study.settle()
    target = load_target(TargetConfig(path=study.target))
    if "record" in parts:
        record(study, target)
    stream = read_stream(study, target)
    held_out = HeldOutSets(study, target, stream)
    tail_share = served_tail_share(study, held_out)
    if "arms" in parts:
        _run_arms(study, stream, held_out, tail_share, names)
    if "offline" in parts:
        distil_offline(study, stream, held_out)
    if "grid" in parts:
        fill_grid(study, stream, tail_share)
    print(write_results(study))
    print(f"results: {study.root}")
    return 0


def served_tail_share(study: Study, held_out: HeldOutSets) -> float:
    """Return the tail share (`redraw`) of the draft that served, over all held-out answers.

    It is measured once (`tail.json`), since every arm's outcomes depend on it.
    """
    file = study.part("tail")
    if not file.is_file():
        draft = load_draft(first_version(study).path, held_out.target)
        rows = [row for segment in range(len(study.segments)) for row in held_out.evaluate(draft, segment)]
        write_json(file, {"share": share_of_room(rows)})
    return float(json.loads(file.read_text())["share"])


def _run_arms(study: Study, stream: Stream, held_out: HeldOutSets, tail_share: float, names: set[str]) -> None:
    """Run the arms that have no file yet. Several processes may share the arms (`--arms`)."""
    for arm in arms(study):
        if arm.name not in names or study.arm(arm.name).is_file():
            continue
        evaluations: dict[str, dict[str, Rows]] = {}

        def evaluate(
            draft: LanguageModel,
            store: Store | None,
            segment: int,
            into: dict[str, dict[str, Rows]] = evaluations,
        ) -> None:
            """Evaluate on held-out answers of the segment, and of the first one, which the draft may have forgotten."""
            into[str(segment)] = {str(exam): held_out.evaluate(draft, exam, store) for exam in sorted({0, segment})}

        figures = run_arm(study, arm, stream, tail_share, evaluate)
        write_json(study.arm(arm.name), {**figures, "exams": evaluations})
        print(f"{arm.name}: {len(figures['updates'])} updates, {figures['seconds']:.0f} s", flush=True)


def _study(options: argparse.Namespace) -> Study:
    chosen = {name: value for name, value in vars(options).items() if name in Study.__dataclass_fields__}
    return Study(root=Path(options.output), **{**chosen, "segments": parse_segments(options.segments)})


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.osd", description=__doc__)
    parser.add_argument("--draft", required=True, help="the static draft, distilled on the first domain")
    parser.add_argument(
        "--segments",
        required=True,
        nargs="+",
        metavar="DOMAIN[=FILE]",
        help="files with a prompt column, in the order of the stream; a repeated domain needs no file",
    )
    parser.add_argument("--output", default="runs/study/osd", help="folder of all results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="parts to run (default: all)")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=USUAL, help=f"arms to run (default: all but {VERIFIED})"
    )
    for name, text in (
        ("requests", "a segment"),
        ("max-tokens", "an answer"),
        ("exam-requests", "held-out requests a segment that drafts are evaluated on"),
        ("speculation-length", "speculation length while recording"),
        ("epochs", "passes over an update's text"),
        ("interval", "requests between updates"),
        ("flush", "requests of OSD's buffer"),
        ("batch-tokens", "tokens of a training step"),
        ("slots", "requests side by side"),
    ):
        default = Study.__dataclass_fields__[name.replace("-", "_")].default
        parser.add_argument(f"--{name}", type=_positive, default=default, help=f"{text} (default {default})")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--loss", default=Study.loss)
    parser.add_argument("--learning-rate", type=float, default=Study.learning_rate)
    parser.add_argument("--held-out", type=float, default=Study.held_out, help="share of requests kept out of training")
    parser.add_argument("--fractions", type=float, nargs="+", default=list(Study.fractions))
    parser.add_argument("--grid-losses", nargs="+", default=list(Study.grid_losses))
    parser.add_argument("--grid-intervals", type=_positive, nargs="+", default=list(Study.grid_intervals))
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _positive(word: str) -> int:
    value = int(word)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{word} must be at least 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
