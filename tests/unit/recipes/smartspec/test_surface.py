"""Figure 5: goodput by batch size and length."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from distillspec.recipes import smartspec as recipe
from distillspec.recipes.smartspec.surface import BATCHES, LENGTHS, surface, write_surface


def test_long_drafts_pay_for_small_batches_alone() -> None:
    goodput = surface(0.7)
    assert goodput.shape == (len(BATCHES), len(LENGTHS))
    best = goodput.argmax(1)
    assert best[0] == 3
    assert best[-1] == 1
    assert (best[1:] <= best[:-1]).all()


def test_a_better_draft_pays_more() -> None:
    assert (surface(0.9)[:, 1:] > surface(0.5)[:, 1:]).all()
    assert (surface(0.9)[:, 0] == surface(0.5)[:, 0]).all()  # nothing is drafted


def test_the_claims_are_the_recorded_ones(tmp_path: Path) -> None:
    recorded = json.loads(Path(recipe.__file__).with_name("results.json").read_text())["figures"]["fig05"]["claims"]
    assert [asdict(claim) for claim in write_surface(tmp_path)] == recorded
    lines = (tmp_path / "fig05.csv").read_text().splitlines()
    assert lines[0] == "alpha,batch," + ",".join(f"k={k}" for k in LENGTHS)
    assert len(lines) == 1 + 3 * len(BATCHES)
