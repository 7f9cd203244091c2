"""`python -m distillspec.recipes.osd.live --draft FOLDER --segments math=FILE … --minutes 20`: the winner, live.

Poisson load on three engines, one after another, with the same arrivals: no speculation, the static draft, and online
adaptation. A trainer runs beside all three, so that all pay for it; only with the last one do its versions serve.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers

from distillspec.config import (
    AdaptConfig,
    EngineConfig,
    GateConfig,
    LossConfig,
    OnlineConfig,
    ReplayConfig,
    TargetConfig,
)
from distillspec.errors import ConfigError, RunError
from distillspec.files import write_json, write_text
from distillspec.models import LanguageModel, load_target
from distillspec.models.draft import load_pretrained
from distillspec.progress import progress
from distillspec.recipes.osd.stream import prompts_of
from distillspec.recipes.osd.study import Segment, parse_segments
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.bench.load import Arrival, poisson_load
from distillspec.serving.online.adaptation import Adaptation, first_draft
from distillspec.serving.online.layout import OnlineSettings

SIDES = ("none", "static", "online")
NEVER = 1e9  # a margin that no gain exceeds
IDLE_S = 0.01


@dataclass
class Minute:
    """What happened in one minute of one side."""

    tokens: int = 0
    proposed: int = 0
    accepted: int = 0
    versions: set[str] = field(default_factory=set)


def main() -> int:
    try:
        return _run(_options())
    except (ConfigError, RunError) as error:
        print(f"osd live: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _run(options: argparse.Namespace) -> int:
    transformers.utils.logging.disable_progress_bar()
    segments = parse_segments(options.segments)
    target = load_target(TargetConfig(path=options.target))
    arrivals = shifting_load(options, segments, target)
    minutes: dict[str, list[Minute]] = {}
    finals: dict[str, Any] = {}
    for side in options.sides:
        minutes[side], finals[side] = run_side(options, side, target, arrivals)
        figures = summary(minutes, finals, options)
        write_json(options.output / "live.json", figures)
        write_text(options.output / "live.md", table(figures))
    _plot(minutes, options.output / "live.png", segments)
    print(table(summary(minutes, finals, options)))
    print(f"results: {options.output}")
    return 0


def shifting_load(options: argparse.Namespace, segments: Sequence[Segment], target: LanguageModel) -> list[Arrival]:
    """Poisson arrivals whose domain changes at equal times, the same for every side."""
    params = SamplingParams(temperature=1.0, max_tokens=options.max_tokens)
    each_s = 60 * options.minutes / len(segments)
    arrivals: list[Arrival] = []
    for place, segment in enumerate(segments):
        prompts = prompts_of(segment, target, options.max_prompt_tokens, options.seed)
        load = poisson_load(prompts, params, options.rate, each_s, options.seed + place)
        named = [replace(arrival.prompt, domain=segment.domain) for arrival in load]
        arrivals += [replace(a, at_s=a.at_s + place * each_s, prompt=p) for a, p in zip(load, named, strict=True)]
    return arrivals


def run_side(
    options: argparse.Namespace, side: str, target: LanguageModel, arrivals: Sequence[Arrival]
) -> tuple[list[Minute], dict[str, Any]]:
    """Serve the load; a row a minute, and what the adaptation says of itself at the end."""
    torch.manual_seed(options.seed)
    settings = side_settings(options, side)
    path = first_draft(settings, target, options.draft)
    draft = None if side == "none" else load_pretrained(str(path), target, target.dtype)
    config = EngineConfig(
        max_slots=options.slots,
        speculation_length=options.speculation_length,
        controller="fixed" if side == "none" else options.controller,
        seed=options.seed,
    )
    engine = Engine(target, draft, config)
    try:
        with Adaptation(engine, settings) as adaptation:
            minutes = _serve(engine, adaptation, arrivals, options, side)
            stats = adaptation.stats()
            verdicts = adaptation.verdicts()
    finally:
        engine.close()
    trainer = {name: stats["trainer"][name] for name in ("updates", "cpu_s", "share", "skipped")}
    return minutes, {"trainer": trainer, "log": stats["log"], "verdicts": verdicts}


def side_settings(options: argparse.Namespace, side: str) -> OnlineSettings:
    """A folder of its own; on all sides but `online` no candidate passes the gate."""
    return OnlineSettings(
        OnlineConfig(mode="on", folder=str(options.output / side)),
        ReplayConfig(share=1.0, flush_s=5.0),
        AdaptConfig(
            every_requests=options.interval,
            epochs=options.epochs,
            learning_rate=options.learning_rate,
            niceness=options.niceness,
        ),
        GateConfig(margin=0.0 if side == "online" else NEVER),
        LossConfig(name=options.loss),
        seed=options.seed,
    )


def _serve(
    engine: Engine, adaptation: Adaptation, arrivals: Sequence[Arrival], options: argparse.Namespace, side: str
) -> list[Minute]:
    """Arrivals come at their times; what would wait behind `--waiting` others is turned away."""
    minutes = [Minute() for _ in range(max(1, round(options.minutes)))]
    seconds, open_, turned_away = 60 * options.minutes, 0, 0
    coming = deque(enumerate(arrivals))
    started = time.monotonic()
    with progress(f"{side}, {options.minutes:g} minutes") as line:
        while (now := time.monotonic() - started) < seconds:
            while coming and coming[0][1].at_s <= now:
                number, arrival = coming.popleft()
                if open_ >= options.slots + options.waiting:
                    turned_away += 1
                    continue
                prompt, name = arrival.prompt, f"{number}/{arrival.prompt.id}"
                engine.submit(Request(name, prompt.token_ids, arrival.params, domain=prompt.domain))
                open_ += 1
            output = engine.step()
            adaptation.on_step(output)
            open_ -= len(output.finished)
            if output.result is None:
                time.sleep(IDLE_S)
                continue
            minute = minutes[min(len(minutes) - 1, int((time.monotonic() - started) / 60))]
            minute.tokens += sum(len(delta.token_ids) for delta in output.deltas)
            minute.proposed += sum(row.proposed for row in output.result.rows)
            minute.accepted += sum(row.accepted for row in output.result.rows)
            for finished in output.finished:
                minute.versions.update(finished.stats.draft_versions)
            line.update(now / seconds, f"{sum(m.tokens for m in minutes) / now:.0f} tokens/s")
    print(f"{side}: {turned_away} of {len(arrivals)} requests found the queue full")
    return minutes


def summary(minutes: dict[str, list[Minute]], finals: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Tokens a second by minute, and each side's times that of no speculation."""
    per_minute_s = 60 * options.minutes / max(1, round(options.minutes))
    speed = {side: [minute.tokens / per_minute_s for minute in rows] for side, rows in minutes.items()}
    ratios = {
        side: [own / plain for own, plain in zip(rows, speed["none"], strict=True) if plain]
        for side, rows in speed.items()
        if side != "none" and "none" in speed
    }
    settings = {name: value for name, value in vars(options).items() if name not in ("output", "draft", "segments")}
    return {
        "settings": {**settings, "segments": [word.partition("=")[0] for word in options.segments]},
        "tokens_per_s": speed,
        "times_none": ratios,
        "accepted_of_proposed": {
            side: [minute.accepted / minute.proposed if minute.proposed else None for minute in rows]
            for side, rows in minutes.items()
        },
        "versions": {side: [sorted(minute.versions) for minute in rows] for side, rows in minutes.items()},
        "ends": finals,
    }


def table(figures: dict[str, Any]) -> str:
    """A row a side."""
    lines = ["| side | tokens/s | times none | worst minute (goal 0.97) | updates |", "|---|---|---|---|---|"]
    for side, speeds in figures["tokens_per_s"].items():
        mean = sum(speeds) / len(speeds)
        ratios = figures["times_none"].get(side)
        plain = figures["tokens_per_s"].get("none")
        overall = f"{sum(speeds) / sum(plain):.3f}" if plain else "–"
        worst = f"{min(ratios):.3f}" if ratios else "–"
        updates = figures["ends"][side]["trainer"]["updates"]
        lines.append(f"| {side} | {mean:.1f} | {overall} | {worst} | {updates} |")
    return "\n".join(lines) + "\n"


def _plot(minutes: dict[str, list[Minute]], path: Path, segments: Sequence[Segment]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for side, rows in minutes.items():
        axis.plot(range(1, len(rows) + 1), [minute.tokens / 60 for minute in rows], "o-", label=side)
    count = max(map(len, minutes.values()))
    for place, segment in enumerate(segments):
        axis.axvline(0.5 + place * count / len(segments), color="grey", linewidth=0.6)
        axis.text(0.6 + place * count / len(segments), 0.02, segment.domain, transform=axis.get_xaxis_transform())
    axis.set_xlabel("minute")
    axis.set_ylabel("tokens a second")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m distillspec.recipes.osd.live", description=__doc__)
    parser.add_argument("--draft", required=True, help="the static draft, where online adaptation starts too")
    parser.add_argument("--segments", required=True, nargs="+", metavar="DOMAIN[=FILE]", help="as for the study")
    parser.add_argument("--output", type=Path, default=Path("runs/study/osd-live"), help="a folder that is not there")
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--minutes", type=float, default=20.0, help="of each side (default 20)")
    parser.add_argument("--rate", type=float, default=1.5, help="requests a second; above what the machine serves")
    parser.add_argument("--waiting", type=int, default=16, help="requests that may wait; more are turned away")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--max-prompt-tokens", type=int, default=256)
    parser.add_argument("--controller", choices=("goodput", "fixed"), default="goodput")
    parser.add_argument("--speculation-length", type=int, default=4)
    parser.add_argument("--interval", type=int, default=32, help="requests between updates")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=5e-4)
    parser.add_argument("--loss", default="jsd")
    parser.add_argument("--niceness", type=int, default=10, help="of the trainer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if options.minutes <= 0:
        parser.error(f"--minutes {options.minutes:g} must be above 0")
    if options.output.exists():
        parser.error(f"--output {options.output} is there already; name another folder")
    return options


if __name__ == "__main__":
    sys.exit(main())
