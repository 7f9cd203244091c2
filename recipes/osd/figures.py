"""Plots: acceptance over the stream, and the arms beside drafts distilled offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distillspec.files import write_png
from distillspec.recipes.osd.goals import alpha
from distillspec.recipes.osd.held_out import alpha_of
from distillspec.recipes.osd.study import Study

WINDOW = 24  # requests of a moving average


def plot_acceptance(arms: dict[str, Any], study: Study, path: Path) -> None:
    """Plot α over requests, each measured before the arm learnt from it. Ticks below are updates."""
    figure = Figure(figsize=(10, 5), dpi=120, layout="constrained")
    axis, ticks = figure.subplots(2, 1, sharex=True, height_ratios=(5, 1))
    for index, (name, arm) in enumerate(arms.items()):
        (line,) = axis.plot(_moving(arm["requests"]), label=name, linewidth=1.2)
        times = [update["after"] for update in arm["updates"]]
        ticks.plot(times, [-index] * len(times), "|", color=line.get_color(), markersize=9)
    rows = next(iter(arms.values()))["requests"]
    for index, segment in enumerate(study.segments):
        start = next(i for i, row in enumerate(rows) if row["segment"] == index)
        axis.axvline(start, color="grey", linewidth=0.6)
        axis.text(start + 2, 0.99, segment.domain, transform=axis.get_xaxis_transform(), va="top")
    axis.set_ylabel(f"acceptance rate α, mean of {WINDOW} requests")
    axis.legend(loc="lower right", ncols=min(5, len(arms)))
    ticks.set_yticks([])
    ticks.set_ylabel("updates")
    ticks.set_xlabel("requests")
    write_png(path, figure)


def plot_offline(arms: dict[str, Any], offline: dict[str, Any], study: Study, path: Path) -> None:
    """Plot α on held-out answers at each segment's end, beside drafts distilled offline on a share of it."""
    figure = Figure(figsize=(2.4 * len(study.segments), 3.2), dpi=120, layout="constrained")
    axes = figure.subplots(1, len(study.segments), sharey=True, squeeze=False)[0]
    for index, (axis, segment) in enumerate(zip(axes, study.segments, strict=True)):
        shares = [fraction for fraction in study.fractions if f"{index}/{fraction:g}" in offline]
        rivals = [alpha_of(offline[f"{index}/{fraction:g}"]["exam"]) for fraction in shares]
        axis.plot([100 * fraction for fraction in shares], rivals, "o-", color="black", label="offline")
        for number, (name, arm) in enumerate(arms.items()):
            reached = alpha_of(arm["exams"][str(index)][str(index)])
            axis.axhline(reached, color=f"C{number}", linewidth=1, linestyle="--", label=name)
        axis.set_title(segment.domain)
        axis.set_xlabel("% of the segment")
    axes[0].set_ylabel("α on held-out answers")
    axes[-1].legend(fontsize="x-small")
    write_png(path, figure)


def _moving(rows: Sequence[dict[str, Any]]) -> list[float]:
    """Return α over the newest `WINDOW` requests, fewer at the start."""
    return [alpha(rows[max(0, i + 1 - WINDOW) : i + 1]) for i in range(len(rows))]
