"""Table and picture of the study, from the runs' summaries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy
from matplotlib.figure import Figure

from distillspec.files import write_json, write_png, write_text
from distillspec.provenance import provenance
from distillspec.recipes.kinds.results import interval_cell
from distillspec.recipes.runs import summary_of
from distillspec.recipes.trees.study import CELLS, MOST_DRAFTS, ROOTS, Study, by_draft
from distillspec.serving.draft_loading import draft_name

HEAD = (
    *("run", "drafts", "verification", "answers", "tokens a step", "of the maximum"),
    *("accepted of", "right", "surprise", "distance", "tokens/s"),
)


def write_results(study: Study) -> str:
    """Write `results.json`, `results.md` and `trees.png` of all runs under the study's root. Return the tables."""
    summaries = {name: summary_of(study.folder(name)) for name in CELLS}
    runs = {name: summary["verifications"] for name, summary in summaries.items() if summary is not None}
    record = {"cells": runs, "target": study.target, "temperature": 0.7}
    write_json(study.root / "results.json", {**record, "provenance": provenance([], 0)})
    rows = [
        _row(name, verification, figures)
        for name, by_verification in runs.items()
        for verification, figures in by_verification.items()
    ]
    table = _lines(HEAD, rows)
    if of_drafts := _by_draft(runs, [draft_name(path) for path in study.drafts]):
        table += "\n" + _lines(["draft", *ROOTS], of_drafts)
    write_text(study.root / "results.md", table)
    _picture(runs, study.root / "trees.png")
    return table


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows)]) + "\n"


def _by_draft(runs: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> list[list[str]]:
    """Return a row of each draft for the paper's table 1: quality and tokens a step by the target's own roots.

    Args:
        names: of the drafts that are given now.
    """
    rows = []
    for number in range(1, 1 + MOST_DRAFTS):
        cells = [runs.get(by_draft(roots, number), {}).get("target_initialised") for roots in ROOTS]
        if any(cells):
            name = names[number - 1] if number <= len(names) else f"draft {number}"
            rows.append([name, *map(_of_roots, cells)])
    return rows if len(rows) > 1 else []


def _of_roots(figures: Mapping[str, Any] | None) -> str:
    """Show the surprise over entropy, and the tokens a step."""
    if figures is None:
        return "–"
    return f"{interval_cell(figures['surprise_over_entropy'])} nats, {figures['tokens_per_step']:.2f} tokens"


def share_of_maximum(name: str, verification: str, tokens: float) -> float | None:
    """Return the accepted length over the tree's depth, as in the multi-candidate paper. None for no fixed depth.

    Args:
        tokens: emitted a step. With `target_initialised` all come from the tree. Else the target adds one of them.
    """
    depth = CELLS[name].depth
    if depth is None:
        return None
    return (tokens if verification == "target_initialised" else tokens - 1) / depth


def _row(name: str, verification: str, figures: dict[str, Any]) -> list[str]:
    share = share_of_maximum(name, verification, figures["tokens_per_step"])
    accuracy = figures["accuracy"]
    return [
        name,
        CELLS[name].about,
        verification,
        str(figures["answers"]),
        f"{figures['tokens_per_step']:.2f}",
        "–" if share is None else f"{share:.2f}",
        _earned(figures.get("accepted_by_source", {})),
        "–" if accuracy is None else f"{accuracy['mean']:.2f}",
        interval_cell(figures["surprise_over_entropy"]),
        f"{figures['distance']:.3f} ({figures['distance_by_chance']:.3f})",
        f"{numpy.median(figures['tokens_per_s']):.0f}",
    ]


def _earned(counts: Mapping[str, int]) -> str:
    """Show the share of the accepted tokens that each of several sources proposed."""
    total = sum(counts.values())
    if len(counts) < 2 or not total:
        return "–"
    return ", ".join(f"{source} {100 * count / total:.0f} %" for source, count in counts.items())


def _picture(runs: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the tokens a step of each run, a bar for each verification."""
    bars = [
        (f"{name}\n{verification}", figures)
        for name, by_verification in runs.items()
        for verification, figures in by_verification.items()
    ]
    figure = Figure(figsize=(1 + 0.9 * len(bars), 4.5), dpi=120, layout="constrained")
    axis = figure.subplots()
    axis.bar([label for label, _ in bars], [figures["tokens_per_step"] for _, figures in bars])
    axis.tick_params("x", rotation=60, labelsize=8)
    axis.set_ylabel("tokens a step")
    write_png(path, figure)
