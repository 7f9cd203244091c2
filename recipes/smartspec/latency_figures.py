"""Sweeps of Figures 1, 3, 11, 12, 14 to 17 and of the ablations: latency by request rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distillspec.recipes.smartspec.sweeps import MakePolicy, Sweep
from distillspec.serving.baselines.smartspec import MovingAcceptance, SmartSpecController
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.costs.acceptance_estimate import AcceptanceEstimate
from distillspec.serving.simulation import Hardware, Policy, SimulatedRequest, load_hardware, load_workload

FIXED = ("fixed-1", "fixed-3", "fixed-5")
BASELINES = ("none", *FIXED)
TREES = ("medusa-top1", "medusa-top2", "medusa-top3")
ADAPTIVE = ("goodput", "smartspec")  # this engine's controller, and the paper's
# Steps of the paper's moving average. For this engine's estimate: trials until an observation has half its weight.
WINDOWS = (10, 50, 200, 1000)


def sweeps() -> dict[str, Sweep]:
    """Return the sweep of each figure. The rates take each machine from idle to saturated."""
    return {**_even_load(), **_draft_models(), **_prompt_lookup(), **_medusa(), **_estimates()}


def _even_load() -> dict[str, Sweep]:
    a100 = load_hardware("a100-7b")
    even = load_workload("even")
    rates = (4, 8, 12, 16, 20, 24)
    title = "Fig. 1 and 3: fixed lengths, α 0.7, 128 in, 128 out"
    random = ("random", "random-request", "oracle")
    expanded = replace(a100, batch_expansion=True)
    return {
        "fig01": Sweep(title, a100, even, rates, (*BASELINES, *ADAPTIVE)),
        "fig01-expansion": Sweep(f"{title}; contexts read for each token", expanded, even, rates, BASELINES),
        "fig14": Sweep("Fig. 14: oracle and random", a100, even, (4, 12, 20), ("none", "fixed-3", *ADAPTIVE, *random)),
    }


def _draft_models() -> dict[str, Sweep]:
    figures = {}
    for name, rates in (("a100-7b", (2, 8, 14)), ("a100x4-33b", (2, 6, 10)), ("a100x8-70b", (2, 6, 10))):
        hardware = load_hardware(name)
        title = f"Fig. 11: {hardware.title}, chat"
        figures[f"fig11-{name}"] = Sweep(title, hardware, load_workload("chat"), rates, (*BASELINES, *ADAPTIVE))
    return figures


def _prompt_lookup() -> dict[str, Sweep]:
    figures = {}
    for name, workload, rates in (
        ("mistral-7b", "summarisation", (1, 3, 5)),
        ("mixtral-8x7b", "summarisation", (1, 3, 5)),
        ("mistral-7b", "context-qa", (1, 2.5, 4)),
        ("mixtral-8x7b", "context-qa", (1, 2.5, 4)),
    ):
        hardware = load_hardware(name)
        title = f"Fig. 12: {hardware.title}, {workload}"
        policies = (*BASELINES, *ADAPTIVE)
        figures[f"fig12-{name}-{workload}"] = Sweep(title, hardware, load_workload(workload), rates, policies)
    return figures


def _medusa() -> dict[str, Sweep]:
    a100 = load_hardware("a100-7b")
    heads = replace(a100, latency=replace(a100.latency, draft=None, draft_free_s=0.0, drafts_block=True))
    return {
        f"fig{number}": Sweep(
            f"Fig. {number}: three Medusa heads, α {alpha}",
            heads,
            load_workload("even", alpha=alpha, sibling_alpha=None),
            (2, 8, 16, 24),
            ("none", *TREES, "medusa"),
        )
        for number, alpha in ((15, 0.8), (16, 0.6))
    }


def _estimates() -> dict[str, Sweep]:
    a100, uneven = load_hardware("a100-7b"), load_workload("chat", request_spread=0.2, drift=0.3)
    windows = tuple((name.format(size), make(size)) for name, make in WINDOWED.items() for size in WINDOWS)
    by_confidence = ("none", "fixed-3", "goodput", "confidence", "confidence-0.3", "smartspec", "smartspec-confidence")
    by_scope = ("none", "goodput-global", "goodput-step", "goodput", "smartspec", "smartspec-request")
    return {
        "fig17": Sweep("Fig. 17: drafting by confidence", a100, load_workload("chat"), (2, 8, 14), by_confidence),
        "lengths": Sweep("Acceptance and lengths: global, step, request", a100, uneven, (2, 8, 14), by_scope),
        "windows": Sweep("Window of the acceptance estimate", a100, uneven, (4, 12), ("none",), others=windows),
    }


def _fading(trials: int) -> MakePolicy:
    """Make goodput with a memory of so many trials for all requests, and a quarter of it for each one."""

    def make(hardware: Hardware, requests: Sequence[SimulatedRequest]) -> Policy:
        estimate = AcceptanceEstimate(5, memory=max(trials / 4, 5), global_memory=trials)
        return Policy("goodput", GoodputController(5, hardware.latency, acceptance=estimate))

    return make


def _moving(steps: int) -> MakePolicy:
    """Make SmartSpec with a moving average over so many steps."""

    def make(hardware: Hardware, requests: Sequence[SimulatedRequest]) -> Policy:
        controller = SmartSpecController(5, hardware.latency, acceptance=MovingAcceptance(steps))
        return Policy("smartspec", controller)

    return make


WINDOWED = {"goodput, {} trials": _fading, "smartspec, {} steps": _moving}
