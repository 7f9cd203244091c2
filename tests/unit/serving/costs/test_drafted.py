"""Costs of drafted tokens in arrays against `LatencyModel`."""

from __future__ import annotations

from itertools import product

import numpy
import pytest

from distillspec.serving.costs.drafted import DraftedCosts
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

TARGET = CostTable(((1.0, 1.0), (4.0, 1.1), (9.0, 3.0)), 0.01, 0.1)
DRAFT = CostTable(((1.0, 0.1), (2.0, 0.3), (3.0, 0.35)), 0.002, 0.05)


@pytest.mark.parametrize("prefill_tokens", [0, 5])
@pytest.mark.parametrize("by_model", [None, [True, False, True], [False, False, False]])
@pytest.mark.parametrize("drafts_block", [False, True])
@pytest.mark.parametrize("draft", [DRAFT, None])
def test_they_are_what_a_step_takes_longer(
    draft: CostTable | None, drafts_block: bool, by_model: list[bool] | None, prefill_tokens: int
) -> None:
    latency, contexts = LatencyModel(TARGET, draft, 0.07, drafts_block), [3, 50, 9]
    model = None if by_model is None else numpy.array(by_model)
    costs = DraftedCosts(latency, numpy.array(contexts), 2, prefill_tokens, model)
    lengths = [*product(range(3), repeat=3)]

    def step_s(chosen: tuple[int, ...]) -> float:
        return latency.step_s(contexts, chosen, prefill_tokens, by_model)

    wanted = [step_s(chosen) - step_s((0, 0, 0)) for chosen in lengths]
    assert costs.of(numpy.array(lengths)).tolist() == pytest.approx(wanted)


@pytest.mark.parametrize("drafts_block", [False, True])
@pytest.mark.parametrize(("rows", "most"), [(0, 4), (1, 0), (0, 0)])
def test_nothing_to_draft_costs_nothing(rows: int, most: int, drafts_block: bool) -> None:
    costs = DraftedCosts(LatencyModel(TARGET, DRAFT, drafts_block=drafts_block), numpy.full(rows, 9), most)
    assert costs.of(numpy.zeros((1, rows), dtype=numpy.int64)).tolist() == [0.0]
