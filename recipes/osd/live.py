"""`python -m distillspec.recipes.osd.live --draft FOLDER --segments math=FILE code=FILE … --turns 3 8`: live.

Servers with default settings take turns under the same Poisson load over HTTP, whose domain shifts: the static draft,
online adaptation, and with `--sides none static online` no speculation. `live.json` is written after every turn.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from distillspec.config import DataConfig
from distillspec.data.prompts import read_rows
from distillspec.errors import ConfigError, RunError
from distillspec.evaluation.measured import in_turn
from distillspec.files import write_json, write_text
from distillspec.progress import progress
from distillspec.provenance import provenance
from distillspec.recipes.osd.side import SIDES, Side, running_side
from distillspec.recipes.osd.study import Segment, parse_segments
from distillspec.recipes.osd.turns import Plan, figures, plot, table
from distillspec.serving import SamplingParams
from distillspec.serving.bench.load import Arrival, Question, poisson_load


@dataclass(frozen=True)
class Loads:
    """The load of every turn, the same for all sides. A domain's prompts come once before any comes again."""

    segments: Sequence[Segment]
    turns: Sequence[int]  # of each segment
    params: SamplingParams
    rate: float
    seconds: float
    seed: int

    def plan(self) -> list[str]:
        """Return the domain of every turn."""
        return [segment.domain for segment, turns in zip(self.segments, self.turns, strict=True) for _ in range(turns)]

    def draw(self) -> list[list[Arrival[Question]]]:
        """Draw the arrivals of all turns.

        Raises:
            ConfigError: a file cannot be read or is empty.
        """
        questions = {segment.domain: self._questions(segment) for segment in self.segments}
        loads = []
        for turn, domain in enumerate(self.plan()):
            load = poisson_load(questions[domain], self.params, self.rate, self.seconds, self.seed + turn)
            drawn = [questions[domain].pop(0) for _ in load]
            questions[domain] += drawn
            arrivals = zip(load, drawn, strict=True)
            loads.append([Arrival(arrival.at_s, question, self.params) for arrival, question in arrivals])
        return loads

    def _questions(self, segment: Segment) -> list[Question]:
        rows = read_rows(DataConfig(prompts=segment.file))
        questions = [Question.of(str(index), row["prompt"], segment.domain) for index, row in enumerate(rows)]
        random.Random(self.seed).shuffle(questions)
        return questions


def main() -> int:
    try:
        return _run(_options())
    except (ConfigError, RunError) as error:
        print(f"osd live: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(options: argparse.Namespace) -> int:
    params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
    segments = parse_segments(options.segments)
    loads = Loads(segments, options.turns, params, options.rate, options.turn_seconds, options.seed)
    arrivals = loads.draw()
    plan = Plan(loads.plan(), shifted_from=options.turns[0])
    with ExitStack() as stack, progress(f"{len(options.sides)} sides, {len(arrivals)} turns each") as line:
        sides = [
            stack.enter_context(running_side(name, options.draft, options.output, _words(options, name)))
            for name in options.sides
        ]
        for turn, load in enumerate(arrivals):
            for index, side in enumerate(in_turn(sides, turn)):
                side.serve(load)
                line.update((turn + (index + 1) / len(sides)) / len(arrivals), f"{side.name}: turn {turn + 1}")
            _write(sides, plan, options)
    print((options.output / "live.md").read_text())
    print(f"results: {options.output}")
    return 0


def _words(options: argparse.Namespace, side: str) -> list[str]:
    return [*options.words, *(options.online_words if side == "online" else [])]


def _write(sides: Sequence[Side], plan: Plan, options: argparse.Namespace) -> None:
    """Write the figures so far."""
    record = figures(sides, plan, options.seed)
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "draft", "segments")}
    write_json(
        options.output / "live.json", {"settings": settings, **record, "provenance": provenance([], options.seed)}
    )
    write_text(options.output / "live.md", table(record))
    plot(record, options.output / "live.png")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.osd.live", description=__doc__)
    parser.add_argument("--draft", required=True, help="the static draft, where online adaptation starts too")
    parser.add_argument("--segments", required=True, nargs="+", metavar="DOMAIN[=FILE]", help="the draft's own first")
    parser.add_argument("--turns", nargs="+", type=int, required=True, help="turns of each segment, as in 3 8 8")
    parser.add_argument("--turn-seconds", type=float, default=60.0, help="of arrivals (default 60)")
    parser.add_argument("--rate", type=float, default=0.5, help="requests a second (default 0.5)")
    parser.add_argument("--output", type=Path, default=Path("runs/study/osd-live"), help="a folder that is not there")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=["static", "online"])
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--words", nargs="*", default=[], help="settings of every server, as in target.path=…")
    parser.add_argument("--online-words", nargs="*", default=[], help="settings of the side that learns alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if len(options.turns) != len(options.segments) or min(options.turns) < 1:
        parser.error(f"--turns {options.turns} must name a number above 0 for each of {len(options.segments)} segments")
    if options.turn_seconds <= 0 or options.rate <= 0:
        parser.error(f"--turn-seconds {options.turn_seconds:g} and --rate {options.rate:g} must be above 0")
    if options.output.exists():
        parser.error(f"--output {options.output} is there already; name another folder")
    return options


if __name__ == "__main__":
    sys.exit(main())
