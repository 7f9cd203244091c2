"""SPIN's parts differ from their base by one setting each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from distillspec.recipes.spin import ablation
from distillspec.recipes.spin.ablation import BASE, PARTS, part_sides, parts_table
from distillspec.recipes.spin.sides import Engines


class Opened:
    """Engines that are only counted."""

    def __init__(self) -> None:
        self.settings: list[dict[str, Any]] = []

    def open(self, drafts: Sequence[str], **settings: Any) -> int:
        self.settings.append(settings)
        return len(self.settings)


def test_each_part_changes_one_thing_of_the_base() -> None:
    changes = {name: sum(a != b for a, b in zip(part, PARTS[BASE], strict=True)) for name, part in PARTS.items()}
    assert changes == {BASE: 0, "selection": 1, "decomposition": 1, "pipelining": 1, "all": 3, "flat": 2}


def test_sides_of_the_same_settings_share_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ablation, "selecting_side", lambda engine, name: (engine, name))
    opened = Opened()
    sides = cast(dict[str, tuple[int, str]], part_sides(cast(Engines, opened), ["a", "b"], "b"))
    assert len(opened.settings) == 5
    assert sides[BASE] == (1, "b")
    assert sides["selection"] == (1, "goodput")
    engine, chosen = sides["all"]
    assert chosen == "goodput"
    assert opened.settings[engine - 1] == {"proposer": "draft_model", "attention": "split", "micro_batches": 2}


def test_the_table_names_what_each_part_has() -> None:
    rates = {name: [100.0 + 10 * place] * 2 for place, name in enumerate(PARTS)}
    table = parts_table({"batch": 4, "best_draft": "b", "tokens_per_s": rates})
    assert "| base | b | masked | 1 | 1.00 [1.00, 1.00] |" in table
    assert "| all | goodput | split | 2 | 1.40 [1.40, 1.40] |" in table
