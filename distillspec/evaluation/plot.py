"""Picture of several drafts: acceptance, block efficiency and predicted speed-up."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from distillspec.evaluation.acceptance import EvaluationResult
from distillspec.files import write_png


def plot_comparison(results: Sequence[EvaluationResult], path: Path) -> None:
    """Write a PNG: α, τ by γ and predicted speed-up by γ (solid: batch 1, dashed: others), all with intervals."""
    # Imported here: it takes a second, and only this function draws. No global backend is touched.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(15, 4.5), dpi=110, layout="constrained")
    alpha, tau, speedup = figure.subplots(1, 3)
    names = short_names(results)
    _draw_alpha(alpha, results, names)
    _draw_tau(tau, results, names)
    _draw_speedup(speedup, results)
    write_png(path, figure)


def _draw_alpha(axes: Any, results: Sequence[EvaluationResult], names: Sequence[str]) -> None:
    for row, result in enumerate(results):
        interval = result.alpha
        below, above = max(interval.mean - interval.low, 0), max(interval.high - interval.mean, 0)
        axes.barh(row, interval.mean, xerr=[[below], [above]], color=f"C{row % 10}", alpha=0.8, capsize=4)
        axes.plot([result.ceiling.mean] * 2, [row - 0.4, row + 0.4], color="black", linestyle=":")
    axes.set(title="acceptance rate α (dotted: ceiling)", xlim=(0, 1))
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()


def _draw_tau(axes: Any, results: Sequence[EvaluationResult], names: Sequence[str]) -> None:
    for row, (result, name) in enumerate(zip(results, names, strict=True)):
        gammas, color = range(1, len(result.tau) + 1), f"C{row % 10}"
        axes.plot(gammas, [interval.mean for interval in result.tau], marker="o", color=color, label=name)
        low, high = [interval.low for interval in result.tau], [interval.high for interval in result.tau]
        axes.fill_between(gammas, low, high, color=color, alpha=0.2)
    axes.set(title="block efficiency τ", xlabel="draft tokens γ", ylabel="tokens a target run")
    axes.legend(fontsize="small")


def _draw_speedup(axes: Any, results: Sequence[EvaluationResult]) -> None:
    for row, result in enumerate(results):
        color, measured = f"C{row % 10}", result.measured
        for batch, speedup in (result.speedup or {}).items():
            style = "-" if batch == 1 else "--"
            gammas = range(1, len(speedup.predicted) + 1)
            axes.plot(gammas, speedup.predicted, linestyle=style, marker=".", color=color)
            low, high = [i.low for i in speedup.intervals], [i.high for i in speedup.intervals]
            axes.fill_between(gammas, low, high, color=color, alpha=0.15, linewidth=0)
            axes.annotate(f"batch {batch}", (gammas[-1], speedup.predicted[-1]), fontsize="x-small")
        if measured is not None:
            ratio = measured.ratio
            whisker = [[max(ratio.mean - ratio.low, 0)], [max(ratio.high - ratio.mean, 0)]]
            axes.errorbar(measured.gamma, ratio.mean, whisker, marker="*", markersize=12, color=color, capsize=3)
    axes.axhline(1, color="grey", linewidth=1)
    axes.set(title="predicted speed-up, 95 % (star: measured)", xlabel="draft tokens γ", ylabel="plain decoding = 1")


def short_names(results: Sequence[EvaluationResult]) -> list[str]:
    """Return the shortest endings of the drafts' paths that are all different."""
    for parts in (1, 2, 3):
        names = ["/".join(Path(result.draft).parts[-parts:]) for result in results]
        if len(set(names)) == len(names):
            return names
    return [f"{number}: {name}" for number, name in enumerate(names, start=1)]
