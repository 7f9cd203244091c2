"""Figures of the live comparison's sides, minute by minute."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distillspec.evaluation.bootstrap import interval
from distillspec.recipes.osd.goals import SAMPLES
from distillspec.recipes.osd.sides import Minute
from distillspec.recipes.osd.study import Segment
from distillspec.types import Interval


def summary(minutes: dict[str, list[Minute]], finals: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return tokens a second by minute, and each side's ratio to no speculation."""
    speed = {side: [minute.speed for minute in rows] for side, rows in minutes.items()}
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
        "overall": {side: asdict(_overall(speed, side, "none")) for side in ratios},
        "online_over_static": asdict(_overall(speed, "online", "static"))
        if {"online", "static"} <= set(speed)
        else None,
        "accepted_of_proposed": {
            side: [minute.accepted / minute.proposed if minute.proposed else None for minute in rows]
            for side, rows in minutes.items()
        },
        "versions": {side: [sorted(minute.versions) for minute in rows] for side, rows in minutes.items()},
        "ends": finals,
    }


def _overall(speed: dict[str, list[float]], side: str, other: str) -> Interval:
    """Return the ratio of speeds over all minutes, with an interval over paired minutes."""
    return interval(speed[side], speed[other], SAMPLES, 0)


def table(figures: dict[str, Any]) -> str:
    """Return a Markdown table with a row a side."""
    lines = [
        "| side | tokens/s | times none | worst minute (goal 0.97) | updates | promoted |",
        "|---|---|---|---|---|---|",
    ]
    for side, speeds in figures["tokens_per_s"].items():
        mean = sum(speeds) / len(speeds)
        ratios = figures["times_none"].get(side)
        whole = figures["overall"].get(side)
        overall = f"{whole['mean']:.3f} [{whole['low']:.3f}, {whole['high']:.3f}]" if whole else "–"
        worst = f"{min(ratios):.3f}" if ratios else "–"
        updates = figures["ends"][side]["trainer"]["updates"]
        promoted = sum(verdict.get("decision") == "promoted" for verdict in figures["ends"][side]["verdicts"])
        lines.append(f"| {side} | {mean:.1f} | {overall} | {worst} | {updates} | {promoted} |")
    if gain := figures["online_over_static"]:
        lines += ["", f"online: {gain['mean']:.3f} [{gain['low']:.3f}, {gain['high']:.3f}] times static"]
    return "\n".join(lines) + "\n"


def plot_minutes(minutes: dict[str, list[Minute]], path: Path, segments: Sequence[Segment]) -> None:
    """Plot tokens a second over the minutes, a line a side."""
    figure = Figure(figsize=(8, 4), layout="constrained")
    axis = figure.subplots()
    for side, rows in minutes.items():
        axis.plot(range(1, len(rows) + 1), [minute.speed for minute in rows], "o-", label=side)
    count = max(map(len, minutes.values()))
    for place, segment in enumerate(segments):
        axis.axvline(0.5 + place * count / len(segments), color="grey", linewidth=0.6)
        axis.text(0.6 + place * count / len(segments), 0.02, segment.domain, transform=axis.get_xaxis_transform())
    axis.set_xlabel("minute")
    axis.set_ylabel("tokens a second")
    axis.set_ylim(bottom=0)
    axis.legend()
    figure.savefig(path, dpi=120)
