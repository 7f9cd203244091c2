"""Costs that outlive a server: read again for the same machine, target, passes and sizes of drafts alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from distillspec.config import DraftConfig, EngineConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving.base.ladder import Ladder
from distillspec.serving.base.tree import DRAFT
from distillspec.serving.costs.kept_costs import cost_key, keep_costs, kept_costs
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

TABLE = CostTable(((1.0, 0.01), (8.0, 0.0125), (40.0, 0.03)), 1e-7, 1e-5, 1e-4, Ladder.tokens(20))
COSTS = LatencyModel(TABLE, TABLE.scaled(0.1), 3e-4, drafts_block=True, members={"b": TABLE.scaled(0.2)})


@pytest.fixture
def draft(target: LanguageModel) -> LanguageModel:
    return initialise_draft(DraftConfig(layers=1), target)


def test_costs_come_back_as_they_were(tmp_path: Path, target: LanguageModel, draft: LanguageModel) -> None:
    file, settings = tmp_path / "costs.json", EngineConfig()
    keep_costs(file, cost_key(target, {DRAFT: draft}, settings), COSTS)
    assert json.loads(file.read_text())["latency"]["at_once"] is True, "the key of files written before"
    another_version = initialise_draft(DraftConfig(layers=1), target)
    assert kept_costs(file, cost_key(target, {DRAFT: another_version}, settings)) == COSTS


def test_costs_of_something_else_are_not_used(tmp_path: Path, target: LanguageModel, draft: LanguageModel) -> None:
    file, settings = tmp_path / "costs.json", EngineConfig()
    key = cost_key(target, {DRAFT: draft}, settings)
    keep_costs(file, key, COSTS)
    larger = initialise_draft(DraftConfig(layers=2), target)
    other_target = replace(target, identity=replace(target.identity, weights_hash="another"))
    others = [
        cost_key(target, {DRAFT: larger}, settings),
        cost_key(target, {"a": draft, "b": draft}, settings),
        cost_key(other_target, {DRAFT: draft}, settings),
        cost_key(target, {DRAFT: draft}, EngineConfig(pack_weights=False)),
        {**key, "machine": {**key["machine"], "threads": key["machine"]["threads"] + 1}},
    ]
    assert [kept_costs(file, other) for other in others] == [None] * 5
    assert kept_costs(file, key) == COSTS


@pytest.mark.parametrize(
    "content", [None, "", "{", "[]", '{"of": 1}', '{"of": {}, "latency": {"target": {"knots": 3}}}']
)
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "costs.json"
    if content is not None:
        file.write_text(content)
    assert kept_costs(file, {}) is None
