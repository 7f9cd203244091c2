"""Tables and pictures of the study."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distillspec.files import write_json, write_text
from distillspec.provenance import provenance
from distillspec.recipes.spin.ablation import parts_table
from distillspec.recipes.spin.kept import PROVENANCE
from distillspec.recipes.spin.live import ABLATION, BATCHES, REGRET
from distillspec.recipes.spin.live_tables import best_draft, live_table
from distillspec.recipes.spin.pictures import draw_live, draw_simulated
from distillspec.recipes.spin.tables import regret_table, tables


def write_results(root: Path, live: Mapping[str, Any], simulated: dict[str, Any], drafts: Sequence[str]) -> str:
    """Write `results.json`, `results.md`, `simulated.png` and, of live runs, `spin.png` under the root.

    Return the tables.
    """
    write_json(
        root / "results.json",
        {"live": live, "simulated": simulated, "drafts": list(drafts), PROVENANCE: provenance([], 0)},
    )
    batches = live.get(BATCHES, {})
    parts = [live_table(batch, figures, drafts) for batch, figures in batches.items()]
    if ABLATION in live:
        parts.append(parts_table(live[ABLATION]))
    recorded = {"recorded answers": live[REGRET]} if REGRET in live else {}
    parts += [regret_table(name, curves) for name, curves in recorded.items()]
    text = "\n\n".join([*parts, tables(simulated)])
    write_text(root / "results.md", text + "\n")
    draw_simulated(simulated, recorded, root / "simulated.png")
    if live:
        best = {batch: best_draft(figures, drafts) for batch, figures in batches.items()}
        draw_live(batches, best, root / "spin.png")
    return text
