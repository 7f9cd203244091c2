"""Costs of a step in plain steps, at the load that is served."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.serving.base.plans import StepResult
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.online.gate.step_costs import ServedLoad, step_costs


@pytest.mark.parametrize("measured", [True, False])
def test_further_tokens_of_a_block_cost_less_than_its_first(target: LanguageModel, measured: bool) -> None:
    """By measured costs a block of four takes one pass over four tokens, and other drafts take four passes."""
    latency = LatencyModel(CostTable.line(0, 0.0, 10.0), CostTable.line(0, 0.1, 0.9)) if measured else None
    block, eagle = (
        step_costs(target, initialise_draft(DraftConfig(kind=kind), target), latency) for kind in ("block", "eagle")
    )
    assert eagle.of(4) - 1 - 4 * eagle.verify == pytest.approx(4 * (eagle.of(1) - 1 - eagle.verify))
    assert block.of(4) - block.of(1) < 0.9 * (eagle.of(4) - eagle.of(1))
    if measured:
        assert block.of(4) == pytest.approx(1 + 0.13)
        assert eagle.of(4) == pytest.approx(1 + 0.4)


def test_verification_is_dearer_beside_more_rows(target: LanguageModel, small_draft: LanguageModel) -> None:
    """Of a machine whose steps take 10 ms and 1 ms a token."""
    latency, load = LatencyModel(CostTable.line(0, 1.0, 10.0), CostTable.line(0, 0.1, 0.9)), ServedLoad()
    alone = step_costs(target, small_draft, latency, load)
    rows: list[Any] = [SimpleNamespace(context_tokens=300)] * 8
    for _ in range(3000):
        load.add(cast(StepResult, SimpleNamespace(view=SimpleNamespace(rows=rows))))
    assert load.contexts == [300] * 8
    assert alone.verify == pytest.approx(1 / 11)
    assert step_costs(target, small_draft, latency, load).verify == pytest.approx(8 / 18)
