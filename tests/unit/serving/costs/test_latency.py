"""Costs of passes and steps: counted by definition, impossible ones refused."""

from __future__ import annotations

from itertools import product

import pytest

from distillspec.errors import ConfigError
from distillspec.serving.control.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable

from ..machine import CPU


def test_costs_count_roots_and_a_draft_batch_that_shrinks() -> None:
    latency = LatencyModel(CostTable.line(0.5, 2.0, 10.0), CostTable.line(0.25, 1.0, 3.0))
    # Target: 30 context, 2 roots and 3 drafted. Draft: depth 1 both rows, depth 2 the first alone.
    assert latency.step_s([10, 20], [2, 1]) == (15 + 10 + 10) + (0.25 * 30 + 2 + 3) + (2.5 + 1 + 3)
    assert latency.step_s([10], [0], prefill_tokens=4) == 5 + 2 * 5 + 10
    assert LatencyModel(CostTable.line(0, 0, 1.0), None, 0.125).step_s([1], [3]) == 1.125
    free = LatencyModel(latency.target, None, 0.125)
    for model, length in product((latency, free), range(4)):
        assert model.alike_s(3, 60, length) == model.step_s([10, 20, 30], [length] * 3)


def test_experts_are_loaded_once_for_all_tokens() -> None:
    mixtral = CostTable.line(0, 0, 1.0, per_expert=0.5, experts=8, active=2)
    assert mixtral.loaded_experts(1.0) == pytest.approx(2)
    assert mixtral.loaded_experts(6.0) == pytest.approx(6.58, abs=0.01)
    # Two rows with two drafted tokens each: six tokens verified, roots included.
    assert LatencyModel(mixtral).target_s([10, 20], [2, 2]) == pytest.approx(1 + 0.5 * mixtral.loaded_experts(6.0))


def test_impossible_settings_are_refused_by_name() -> None:
    for make, name in (
        (lambda: CostTable.line(-1, 0, 0), "per_context=-1"),
        (lambda: CostTable.line(0, float("nan"), 0), "per_token=nan"),
        (lambda: CostTable.line(0, 0, 0, per_expert=1.0), r"per_expert=1\.0"),
        (lambda: CostTable.line(0, 0, 0, experts=2, active=3), "active=3"),
        (lambda: LatencyModel(CPU.target, CostTable.line(0, 0, 0, experts=8, active=2)), "experts=8"),
        (lambda: LatencyModel(CPU.target, draft_free_s=-1.0), r"draft_free_s=-1\.0"),
        (lambda: GoodputController(-1), "longest=-1"),
        (lambda: AcceptanceEstimate(4, prior=1.0), r"prior=1\.0"),
        (lambda: CostCalibration(CostTable.line(0, 0, 0), forgetting=0.0), r"forgetting=0\.0"),
    ):
        with pytest.raises(ConfigError, match=name):
            make()
