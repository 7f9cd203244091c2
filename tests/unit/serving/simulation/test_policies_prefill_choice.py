"""Prompt tokens read beside decoding rows are no reason to draft more: found by simulation, held here."""

from __future__ import annotations

import pytest

from distillspec.config import WorkloadConfig
from distillspec.serving.base.rows import BatchView, RowView
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.simulation import Simulation, load_hardware, make_policy, make_workload
from distillspec.serving.simulation.figures import figures_of


def test_lengths_do_not_depend_on_prompts_read_in_the_same_step() -> None:
    latency = load_hardware("a100-7b").latency
    controller = GoodputController(5, latency)
    rows = tuple(RowView(f"r{i}", 200, 100) for i in range(40))
    alone, beside = controller.plan(BatchView(rows)), controller.plan(BatchView(rows, prefill_tokens=1000))
    assert [row.speculation_length for row in beside.rows] == [row.speculation_length for row in alone.rows]
    assert beside.predicted_s is not None
    assert alone.predicted_s is not None
    assert beside.predicted_s - alone.predicted_s == pytest.approx(latency.prompts_s(40, 1000))


@pytest.mark.parametrize("rate", [16.0])
def test_goodput_is_near_the_best_fixed_length_under_load(rate: float) -> None:
    hardware = load_hardware("a100-7b")
    requests = make_workload(WorkloadConfig(requests=120), rate)
    latency = {
        name: figures_of(
            name, rate, Simulation(requests, make_policy(name, hardware.latency, requests), hardware).run()
        ).mean_latency_s
        for name in ("goodput", "none", "fixed-1", "fixed-2", "fixed-3")
    }
    assert latency["goodput"] < 1.03 * min(latency.values()), latency
