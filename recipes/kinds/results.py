"""Table and picture of the study, from the runs' summaries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from distillspec.files import write_json, write_text
from distillspec.provenance import provenance
from distillspec.recipes.kinds.study import Study

SHOWN = 4  # drafted positions in the table


def summary_of(folder: Path) -> dict[str, Any] | None:
    """Return the summary of a finished run, None for others."""
    file = folder / "summary.json"
    found: dict[str, Any] | None = json.loads(file.read_text()) if file.is_file() else None
    return found


def write_results(study: Study) -> str:
    """Write `results.json`, `results.md` and `kinds.png` under the study's root. Return the table."""
    found = {kind: summary_of(study.folder(kind)) for kind in study.kinds}
    kinds = {kind: _figures(study.folder(kind), summary) for kind, summary in found.items() if summary is not None}
    record = {"kinds": kinds, "minutes": study.minutes, "text_minutes": study.text_minutes, "target": study.target}
    write_json(study.root / "results.json", {**record, "provenance": provenance([], 0)})
    table = _table(kinds)
    write_text(study.root / "results.md", table)
    _picture(kinds, study.root / "kinds.png")
    return table


def _figures(run: Path, summary: dict[str, Any]) -> dict[str, Any]:
    after = summary["after"]
    cost, speedup = after["cost"], after["speedup"]
    return {
        "alpha": after.get("alpha_by_position") or [after["alpha"]],
        "tau": after["tau"],
        "c": {batch: each["c"] for batch, each in cost.items()},
        "draft_steps": {batch: each["draft_steps"] for batch, each in cost.items()},
        "predicted": {batch: max(each["intervals"], key=lambda i: i["mean"]) for batch, each in speedup.items()},
        "measured": after.get("measured"),
        "bytes": sum(file.stat().st_size for file in (run / "draft").glob("*.safetensors")),
        "minutes": summary.get("minutes"),
    }


def _table(kinds: dict[str, dict[str, Any]]) -> str:
    batches = sorted({batch for each in kinds.values() for batch in each["c"]}, key=int)
    head = ["kind", "α by position", f"τ({SHOWN})", "c", *(f"predicted at {b}" for b in batches), "measured", "MB"]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for kind, each in kinds.items():
        measured = each["measured"]
        cells = [
            kind,
            ", ".join(f"{alpha['mean']:.3f}" for alpha in each["alpha"][:SHOWN]),
            f"{each['tau'][SHOWN - 1]['mean']:.2f}",
            f"{each['c'][batches[0]]:.3f}",
            *(interval_cell(each["predicted"].get(batch)) for batch in batches),
            "–" if measured is None else f"{interval_cell(measured['ratio'])} with {measured['gamma']}",
            f"{each['bytes'] / 1e6:.0f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def interval_cell(value: dict[str, float] | None) -> str:
    """Return a mean with its interval for a table, a dash for None."""
    return "–" if value is None else f"{value['mean']:.2f} [{value['low']:.2f}, {value['high']:.2f}]"


def _picture(kinds: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw tokens a step against what their drafting costs, a line a kind, a point a length."""
    figure = Figure(figsize=(7, 5), layout="constrained")
    axis = figure.subplots()
    for kind, each in kinds.items():
        batch = min(each["c"], key=int)
        steps = each["draft_steps"][batch]
        costs = [each["c"][batch] * step for step in steps]
        axis.plot(costs, [tau["mean"] for tau in each["tau"][: len(costs)]], marker="o", label=kind)
    axis.set_xlabel("cost of drafting, in plain steps at batch 1")
    axis.set_ylabel("τ, tokens a step")
    axis.grid(alpha=0.3)
    axis.legend()
    figure.savefig(path, dpi=120)
