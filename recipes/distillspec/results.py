"""Table and heat maps of the study, from the cells' summaries."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distillspec.files import write_json, write_png, write_text
from distillspec.provenance import provenance
from distillspec.recipes.distillspec.grid import LOSSES, SOURCES, Study
from distillspec.recipes.runs import summary_of

GAMMA = 4


def collect(study: Study) -> dict[str, Any]:
    """Return α and τ with intervals of every finished cell and of the undistilled draft."""
    cells: dict[str, dict[str, Any]] = {}
    undistilled: dict[str, Any] | None = None
    for loss in LOSSES:
        for source in SOURCES:
            summary = summary_of(study.cell(loss, source))
            if summary is not None:
                undistilled = undistilled or _figures(summary["before"])
                cells[f"{loss}-{source}"] = {**_figures(summary["after"]), "minutes": summary["minutes"]}
    return {
        "cells": cells,
        "undistilled": undistilled,
        "tokens": study.tokens,
        "warm_tokens": study.warm_tokens,
        "jobs": study.jobs,
        "target": study.target,
        "layers": study.layers,
        "vocabulary": study.vocabulary,
        "provenance": provenance([], 0),
    }


def write_results(study: Study) -> str:
    """Write `results.json`, `results.md` and `heatmap.png` under the study's root. Return the table."""
    results = collect(study)
    write_json(study.root / "results.json", results)
    table = _table(results)
    write_text(study.root / "results.md", table)
    _heat_maps(results, study.root / "heatmap.png")
    return table


def _figures(evaluation: dict[str, Any]) -> dict[str, Any]:
    return {"alpha": evaluation["alpha"], "tau": evaluation["tau"][GAMMA - 1]}


def _table(results: dict[str, Any]) -> str:
    lines = [f"| loss \\ source | {' | '.join(SOURCES)} |", f"|---|{'---|' * len(SOURCES)}"]
    for loss in LOSSES:
        cells = [results["cells"].get(f"{loss}-{source}") for source in SOURCES]
        lines.append(f"| {loss} | {' | '.join(_cell(cell) for cell in cells)} |")
    lines.append(f"\nUndistilled draft: {_cell(results['undistilled'])}. Cells: α [95 % interval], τ({GAMMA}).\n")
    return "\n".join(lines)


def _cell(cell: dict[str, Any] | None) -> str:
    if cell is None:
        return "–"
    alpha = cell["alpha"]
    return f"{alpha['mean']:.3f} [{alpha['low']:.3f}, {alpha['high']:.3f}], {cell['tau']['mean']:.2f}"


def _heat_maps(results: dict[str, Any], path: Path) -> None:
    figure = Figure(figsize=(10, 4), dpi=120, layout="constrained")
    for axis, key, title in zip(
        figure.subplots(1, 2), ("alpha", "tau"), ("acceptance rate α", f"block efficiency τ({GAMMA})"), strict=True
    ):
        values = [
            [results["cells"].get(f"{loss}-{source}", {}).get(key, {}).get("mean", float("nan")) for source in SOURCES]
            for loss in LOSSES
        ]
        image = axis.imshow(values, cmap="viridis", aspect="auto")
        axis.set_xticks(range(len(SOURCES)), SOURCES)
        axis.set_yticks(range(len(LOSSES)), LOSSES)
        axis.set_title(title)
        for row, line in enumerate(values):
            for column, value in enumerate(line):
                if value == value:
                    axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="white")
        figure.colorbar(image, ax=axis)
    write_png(path, figure)
