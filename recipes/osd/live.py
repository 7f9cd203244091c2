"""`python -m distillspec.recipes.osd.live --draft FOLDER --segments math=FILE … --minutes 20`: the winner, live.

Poisson load on three engines that take short turns, with the same arrivals: no speculation, the static draft and online
adaptation. A trainer runs beside each, so that all pay its cost. Its versions serve with the last one only.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
import transformers

from distillspec.config import TargetConfig
from distillspec.errors import ConfigError, RunError
from distillspec.files import write_json, write_text
from distillspec.models import load_target
from distillspec.progress import progress
from distillspec.provenance import provenance
from distillspec.recipes.osd.minutes import plot_minutes, summary, table
from distillspec.recipes.osd.sides import SIDES, Side, shifting_load
from distillspec.recipes.osd.study import Segment, parse_segments


def main() -> int:
    try:
        return _run(_options())
    except (ConfigError, RunError) as error:
        print(f"osd live: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(options: argparse.Namespace) -> int:
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(options.seed)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    segments = parse_segments(options.segments)
    arrivals = shifting_load(options, segments, load_target(TargetConfig(path=options.target)))
    turns = max(1, round(60 * options.minutes / options.turn_seconds))
    with ExitStack() as stack, progress(f"{len(options.sides)} sides, {options.minutes:g} minutes each") as line:
        sides = [stack.enter_context(Side(options, name, arrivals)) for name in options.sides]
        for turn in range(turns):
            for place in range(len(sides)):
                side = sides[(turn + place) % len(sides)]  # the order rotates, since the machine's speed changes
                side.serve(turn, 60 * options.minutes / turns)
                done = turn + (place + 1) / len(sides)
                line.update(done / turns, f"{side.name}: {side.minutes[-1].speed:.0f} tokens/s")
            _write(sides, segments, options)
    for side in sides:
        print(f"{side.name}: {side.turned_away} of {len(arrivals)} requests found the queue full")
    print((options.output / "live.md").read_text())
    print(f"results: {options.output}")
    return 0


def _write(sides: Sequence[Side], segments: Sequence[Segment], options: argparse.Namespace) -> None:
    """Write the figures so far."""
    minutes = {side.name: side.minutes for side in sides}
    figures = summary(minutes, {side.name: side.end() for side in sides}, options)
    write_json(options.output / "live.json", {**figures, "provenance": provenance([], options.seed)})
    write_text(options.output / "live.md", table(figures))
    plot_minutes(minutes, options.output / "live.png", segments)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.osd.live", description=__doc__)
    parser.add_argument("--draft", required=True, help="the static draft, where online adaptation starts too")
    parser.add_argument("--segments", required=True, nargs="+", metavar="DOMAIN[=FILE]", help="as for the study")
    parser.add_argument("--output", type=Path, default=Path("runs/study/osd-live"), help="a folder that is not there")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--minutes", type=float, default=20.0, help="of each side (default 20)")
    parser.add_argument("--turn-seconds", type=float, default=15.0, help="after which another side has its turn")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second; above what the machine serves")
    parser.add_argument("--waiting", type=int, default=16, help="requests that may wait; more are turned away")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--threads", type=int, help="of the engine; one fewer than cores leaves the trainer its own")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--controller", choices=("goodput", "fixed"), default="goodput")
    parser.add_argument("--speculation-length", type=int, default=4)
    parser.add_argument("--interval", type=int, default=32, help="requests between updates")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--loss", default="jsd")
    parser.add_argument("--niceness", type=int, default=0, help="of the trainer; 10 starves it on a full machine")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.minutes <= 0 or options.turn_seconds <= 0:
        parser.error(f"--minutes {options.minutes:g} and --turn-seconds {options.turn_seconds:g} must be above 0")
    if options.threads is not None and options.threads < 1:
        parser.error(f"--threads {options.threads} must be at least 1")
    if options.output.exists():
        parser.error(f"--output {options.output} is there already; name another folder")
    return options


if __name__ == "__main__":
    sys.exit(main())
