"""Curves of the simulated part: idle shares by the number of micro-batches, and the end of the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from distillspec.config.simulation import HardwareConfig
from distillspec.recipes.spin.runs import rate, simulation
from distillspec.serving.simulation import Hardware, SimulatedRequest, derive_hardware
from distillspec.serving.simulation.figures import figures_of

COUNTS = (1, 2, 3, 4, 6, 8)
LENGTH = "fixed-4"  # lengths by no rule, so that nothing but the number of micro-batches differs
TEXT = 160  # tokens a row that fit into the small memory with the caches of all drafts. Answers end at 256


def micro_batches(machine: Hardware, requests: Sequence[SimulatedRequest], draft: str) -> dict[str, Any]:
    """Return tokens a second, and the shares of the time in which draft and target wait, by micro-batches."""
    curve: dict[str, Any] = {"draft": draft}
    measured = dict[int, dict[str, float]]()
    for count in COUNTS:
        parts = min(count, machine.slots)  # a part has at least one row
        if parts not in measured:
            measured[parts] = _idle(replace(machine, micro_batches=parts), requests, draft)
        curve[str(count)] = measured[parts]
    return curve


def _idle(machine: Hardware, requests: Sequence[SimulatedRequest], draft: str) -> dict[str, float]:
    figures = figures_of("", None, simulation(machine, requests, LENGTH, draft).run())
    return {"tokens_per_s": figures.tokens_per_s, "draft_idle": figures.draft_idle, "target_idle": figures.target_idle}


def memory_end(
    config: HardwareConfig, requests: Sequence[SimulatedRequest], rows: int, policy: str, best: str
) -> dict[str, Any]:
    """Compare goodput with the best single draft where the caches of all drafts leave no room for all rows.

    The best single draft has all of the same memory.
    """
    models = [config.target, *config.drafts.values()]
    weights = sum(model.params * model.bytes_per_param for model in models)
    room = max(config.max_len, rows * TEXT) * sum(model.kv_bytes for model in models)
    small = replace(config, memory=(weights + room) / config.memory_share * 1.001, slots=rows)
    alone = replace(small, drafts={best: config.drafts[best]})
    comparison: dict[str, Any] = {"memory_bytes": small.memory, "best_draft": best}
    for name, hardware, selection in (("goodput", small, "goodput"), ("alone", alone, best)):
        machine = derive_hardware(hardware)
        result = simulation(machine, requests, policy, selection).run()
        figures = figures_of("", None, result)
        comparison[name] = {
            "tokens_per_s": rate(result),
            "cache_tokens": machine.cache_tokens,
            "rows": figures.mean_batch,
            "preemptions": figures.preemptions,
        }
    return comparison
