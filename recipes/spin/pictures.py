"""Pictures of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from distillspec.files import write_png
from distillspec.recipes.rates import interval, ratios
from distillspec.recipes.spin.kept import SETTINGS
from distillspec.recipes.spin.layouts import COUNTS
from distillspec.recipes.spin.regret import LEARNING, TRACES
from distillspec.recipes.spin.simulated import MACHINES, REGRET


def draw_live(live: Mapping[str, Any], best: Mapping[str, str], path: Path) -> None:
    """Draw the rates of all sides over that of the best single draft, `best` by batch."""
    figure = Figure(figsize=(4 * len(live), 4), dpi=120, layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(live), squeeze=False)[0]
    for axis, (batch, measured) in zip(axes, live.items(), strict=True):
        rates, draft = measured["tokens_per_s"], best[batch]
        names = [name for name in rates if name != draft]
        means = [interval(ratios(rates, name, draft)) for name in names]
        spread = [[mean - low for mean, low, _ in means], [high - mean for mean, _, high in means]]
        axis.errorbar([mean for mean, _, _ in means], range(len(names)), xerr=spread, fmt="o")
        axis.set_yticks(range(len(names)), names)
        axis.axvline(1.0, color="grey", linewidth=1)
        axis.set_xlabel(f"tokens/s over those of {draft}, batch {batch}")
    write_png(path, figure)


def draw_simulated(simulated: Mapping[str, Any], recorded: Mapping[str, Any], path: Path) -> None:
    """Draw regret on each trace, and the first machine's micro-batches with the dearest draft and the most rows.

    Args:
        recorded: regret on further traces.
    """
    traces = {**{name: simulated[REGRET][name] for name in TRACES}, **recorded}
    figure = Figure(figsize=(4 * (len(traces) + 1), 3.6), dpi=110, layout="constrained")
    axes: Sequence[Axes] = figure.subplots(1, len(traces) + 1, squeeze=False)[0]
    for axis, (name, trace) in zip(axes, traces.items(), strict=False):
        for chosen in LEARNING:
            axis.plot(trace["answers"], trace["regret"][chosen], label=chosen)
        axis.set(title=name, xlabel="answers", ylabel="regret, answers of the oracle", xscale="log")
        axis.legend(fontsize="small")
    machine = simulated[SETTINGS]["machines"][0]
    curves = simulated[MACHINES][machine]["micro_batches"]
    dearest = curves[rows := max(curves, key=int)][-1]
    _idle(axes[-1], dearest)
    axes[-1].set_title(f"{machine}, {rows} rows, {dearest['draft']}")
    write_png(path, figure)


def _idle(axis: Axes, curve: Mapping[str, Any]) -> None:
    points = [curve[str(count)] for count in COUNTS]
    first = points[0]["tokens_per_s"]
    axis.plot(COUNTS, [point["tokens_per_s"] / first for point in points], marker="o", label="tokens/s over one")
    for idle, name in (("draft_idle", "draft idle"), ("target_idle", "target idle")):
        axis.plot(COUNTS, [point[idle] for point in points], linestyle="--", marker=".", label=name)
    axis.set(xlabel="micro-batches", ylim=(0, None))
    axis.legend(fontsize="small")
