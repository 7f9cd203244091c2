"""Tables and picture of the study, from the runs' summaries."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distillspec.data.folder import DataFolder
from distillspec.data.shards import recorded_seconds
from distillspec.files import folder_bytes, write_json, write_png, write_text
from distillspec.provenance import provenance
from distillspec.recipes.kinds.elsewhere import cells
from distillspec.recipes.kinds.study import FIRST, KINDS, SIDE_BY_SIDE, Study
from distillspec.recipes.runs import summary_of

SHOWN = 4  # drafted positions in the table


def figures_of(study: Study) -> dict[str, dict[str, Any]]:
    """Return the figures of the finished kinds."""
    summaries = {kind: summary_of(study.folder(kind)) for kind in study.kinds}
    text_s = recorded_seconds(DataFolder(study.folder(FIRST) / "data").samples)
    text = {"text_minutes": None if text_s is None else text_s / 60}
    return {
        kind: _figures(study.folder(kind), summary) | text for kind, summary in summaries.items() if summary is not None
    }


def write_results(study: Study) -> str:
    """Write `results.json`, `results.md` and `kinds.png` under the study's root. Return the tables."""
    kinds = figures_of(study)
    record = {"kinds": kinds, "minutes": study.minutes, "text_minutes": study.text_minutes, "target": study.target}
    record["elsewhere"] = _elsewhere(study, kinds)
    write_json(study.root / "results.json", {**record, "provenance": provenance([], 0)})
    text = tables(record)
    write_text(study.root / "results.md", text)
    _picture(kinds, study.root / "kinds.png")
    return text


def tables(record: Mapping[str, Any]) -> str:
    """Return the tables of a `results.json`. Figures that one of an earlier version lacks are dashes."""
    elsewhere, kinds = record.get("elsewhere"), record["kinds"]
    table = _table({kind: kinds[kind] for kind in KINDS if kind in kinds}, record.get("text_minutes"))
    return table + ("\n" + _table_elsewhere(elsewhere) if elsewhere else "")


def _elsewhere(study: Study, kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return the judgements on other text and at other temperatures, by draft. The best kind comes first."""
    summaries = {cell: summary_of(cell.folder(study)) for cell in cells(study, kinds)}
    return {
        cell.name: dict(zip(cell.kinds, map(_judged, summary["results"]), strict=True))
        for cell, summary in summaries.items()
        if summary is not None
    }


def _judged(after: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of an evaluation."""
    cost, speedup = after["cost"], after["speedup"]
    figures = {
        "alpha": after.get("alpha_by_position") or [after["alpha"]],
        "tau": after["tau"],
        "c": {batch: at_batch["c"] for batch, at_batch in cost.items()},
        "draft_steps": {batch: at_batch["draft_steps"] for batch, at_batch in cost.items()},
        "predicted": {batch: max(at_batch["intervals"], key=itemgetter("mean")) for batch, at_batch in speedup.items()},
        "measured": after.get("measured"),
        "measured_at": after.get("measured_at") or {},
    }
    return {**figures, "best_ratio": _ratio(figures)}


def _ratio(figures: Mapping[str, Any]) -> float | None:
    return best_ratio([tau["mean"] for tau in figures["tau"]], figures["c"]["1"]) if "1" in figures["c"] else None


def best_ratio(tau: Sequence[float], c: float) -> float:
    """Return the largest τ(k) / (1 + k · c): the speed-up if verifying k tokens took no longer than a plain step."""
    return max(tokens / (1 + k * c) for k, tokens in enumerate(tau, 1))


def _figures(run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    return {
        **_judged(summary["after"]),
        "bytes": folder_bytes(run / "draft"),
        "minutes": summary.get("minutes"),
    }


def _table(kinds: Mapping[str, dict[str, Any]], text_minutes: float | None) -> str:
    """Return the table of the kinds.

    Args:
        text_minutes: given for writing the text, for kinds that do not tell how many it took.
    """
    batches = sorted({batch for figures in kinds.values() for batch in figures["c"]}, key=int)
    predicted = [f"predicted at {batch}" for batch in batches]
    measured_batches = sorted({SIDE_BY_SIDE, *_batches_measured(kinds.values())}, key=int)
    head = ["kind", "α by position", f"τ({SHOWN})", "c", "max τ(k)/(1 + k·c)", *predicted]
    head += ["measured", "by default", *(f"measured at {batch}" for batch in measured_batches)]
    head += ["minutes of text + training", "MB"]
    rows = [
        [
            kind,
            _alphas(figures),
            f"{figures['tau'][SHOWN - 1]['mean']:.2f}",
            f"{figures['c'][batches[0]]:.3f}",
            _number(_ratio(figures), 2),
            *(interval_cell(figures["predicted"].get(batch)) for batch in batches),
            *_measured_cells(figures.get("measured")),
            *_cells_at(figures, measured_batches),
            f"{_number(figures.get('text_minutes', text_minutes), 0)} + {_number(figures.get('minutes'), 0)}",
            _number(figures["bytes"] / 1e6 if "bytes" in figures else None, 0),
        ]
        for kind, figures in kinds.items()
    ]
    return _lines(head, rows)


def _table_elsewhere(by_cell: dict[str, dict[str, Any]]) -> str:
    measured_batches = _batches_measured(figures for kinds in by_cell.values() for figures in kinds.values())
    head = ["prompts", "kind", "α by position", f"τ({SHOWN})", "measured", "by default"]
    head += [f"measured at {batch}" for batch in measured_batches]
    rows = [
        [
            name,
            kind,
            _alphas(figures),
            f"{figures['tau'][SHOWN - 1]['mean']:.2f}",
            *_measured_cells(figures.get("measured")),
            *_cells_at(figures, measured_batches),
        ]
        for name, kinds in by_cell.items()
        for kind, figures in kinds.items()
    ]
    return _lines(head, rows)


def _lines(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n".join(lines) + "\n"


def _alphas(figures: dict[str, Any]) -> str:
    return ", ".join(f"{alpha['mean']:.3f}" for alpha in figures["alpha"][:SHOWN])


def _measured_cells(measured: dict[str, Any] | None) -> tuple[str, str]:
    """Return the speed-up of the best fixed length, and that of a server's defaults."""
    if measured is None:
        return "–", "–"
    return f"{interval_cell(measured['ratio'])} with {measured['gamma']}", interval_cell(measured.get("served"))


def _batches_measured(kinds: Iterable[dict[str, Any]]) -> list[str]:
    """Return the numbers of prompts that were decoded side by side, above 1."""
    return sorted({batch for figures in kinds for batch in figures.get("measured_at", ())}, key=int)


def _cells_at(figures: dict[str, Any], batches: Sequence[str]) -> list[str]:
    """Return the speed-up of the best fixed length at each of these."""
    return [_measured_cells(figures.get("measured_at", {}).get(batch))[0] for batch in batches]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def interval_cell(value: dict[str, float] | None) -> str:
    """Return a mean with its interval for a table, a dash for None."""
    return "–" if value is None else f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _picture(kinds: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw tokens a step against what their drafting costs, a line a kind, a point a length."""
    figure = Figure(figsize=(7, 5), dpi=120, layout="constrained")
    axis = figure.subplots()
    for kind, figures in kinds.items():
        batch = min(figures["c"], key=int)
        steps = figures["draft_steps"][batch]
        costs = [figures["c"][batch] * step for step in steps]
        axis.plot(costs, [tau["mean"] for tau in figures["tau"][: len(costs)]], marker="o", label=kind)
    axis.set_xlabel("cost of drafting, in plain steps at batch 1")
    axis.set_ylabel("τ, tokens a step")
    axis.grid(alpha=0.3)
    axis.legend()
    write_png(path, figure)
