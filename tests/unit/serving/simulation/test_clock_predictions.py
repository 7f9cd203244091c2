"""Predicted step times against the simulator's own, which come from the same kind of table."""

from __future__ import annotations

import numpy
import pytest

from distillspec.config import WorkloadConfig
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.latency import LatencyModel
from distillspec.serving.costs.table import CostTable
from distillspec.serving.simulation import Hardware, Policy, Simulation, make_workload

TABLES = LatencyModel(
    CostTable(((1.0, 0.027), (5.0, 0.0285), (16.0, 0.035), (64.0, 0.07), (512.0, 0.5)), 2e-7, 2e-4),
    CostTable(((1.0, 0.004), (8.0, 0.005), (64.0, 0.02)), 1e-7),
)
SLOWED = LatencyModel(TABLES.target.scaled(0.6), TABLES.draft.scaled(0.8) if TABLES.draft is not None else None)


@pytest.mark.parametrize("rate", [0.2, 0.8, 1.6, 3.0])
@pytest.mark.parametrize("known", [TABLES, SLOWED, None], ids=["as measured", "slower since", "guessed"])
def test_predicted_step_times_are_near_at_every_load(rate: float, known: LatencyModel | None) -> None:
    """Within 8 % in the median, on steps whose times vary by 5 %, prompts and changing batches among them."""
    hardware = Hardware(TABLES, 20_000, slots=8, max_len=1024, prefill_chunk=256, noise=0.05)
    load = WorkloadConfig(requests=25, prompt_tokens=100, prompt_spread=0.5, output_tokens=64, output_spread=0.5)
    policy = Policy("goodput", GoodputController(4, known))
    steps = Simulation(make_workload(load, rate, seed=1), policy, hardware).run().steps
    errors = [abs((step.predicted_s or 0.0) / step.seconds - 1) for step in steps if step.rows]
    assert len(errors) > 150
    assert float(numpy.median(errors)) < 0.08
    assert float(numpy.mean([step.proposed > 0 for step in steps])) > 0.3
