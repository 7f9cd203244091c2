"""Figures 1, 3, 11, 12, 14 to 17 and the ablations: latency over request rate, and what the paper says of it."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from distillspec.recipes.smartspec.sweeps import (
    MakePolicy,
    Sweep,
    latencies,
    worst_against_best,
)
from distillspec.serving.control.acceptance import AcceptanceEstimate
from distillspec.serving.control.goodput import GoodputController
from distillspec.serving.control.smartspec import MovingAcceptance, SmartSpecController
from distillspec.serving.simulation import Hardware, Policy, SimulatedRequest, load_hardware, load_workload
from distillspec.serving.simulation.figures import RunFigures

FIXED = ("fixed-1", "fixed-3", "fixed-5")
BASELINES = ("none", *FIXED)
TREES = ("medusa-top1", "medusa-top2", "medusa-top3")
ADAPTIVE = ("goodput", "smartspec")  # this engine's own, and the paper's
WINDOWS = (10, 50, 200, 1000)  # steps of the paper's moving average; trials until ours has half its weight


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper, what was seen here, and whether they agree."""

    figure: str
    claim: str
    seen: str
    holds: bool


def sweeps() -> dict[str, Sweep]:
    """Figure by figure; rates are where each machine goes from idle to saturated."""
    return {**_even_load(), **_draft_models(), **_prompt_lookup(), **_medusa(), **_estimates()}


def _even_load() -> dict[str, Sweep]:
    a100, even, rates = load_hardware("a100-7b"), load_workload("even"), (4, 8, 12, 16, 20, 24)
    title, random = "Fig. 1 and 3: fixed lengths, α 0.7, 128 in, 128 out", ("random", "random-request", "oracle")
    expanded = replace(a100, batch_expansion=True)
    return {
        "fig01": Sweep(title, a100, even, rates, (*BASELINES, *ADAPTIVE)),
        "fig01-expansion": Sweep(f"{title}; contexts read for each token", expanded, even, rates, BASELINES),
        "fig14": Sweep("Fig. 14: oracle and random", a100, even, (4, 12, 20), ("none", "fixed-3", *ADAPTIVE, *random)),
    }


def _draft_models() -> dict[str, Sweep]:
    found = {}
    for name, rates in (("a100-7b", (2, 8, 14)), ("a100x4-33b", (2, 6, 10)), ("a100x8-70b", (2, 6, 10))):
        hardware = load_hardware(name)
        title = f"Fig. 11: {hardware.title}, chat"
        found[f"fig11-{name}"] = Sweep(title, hardware, load_workload("chat"), rates, (*BASELINES, *ADAPTIVE))
    return found


def _prompt_lookup() -> dict[str, Sweep]:
    found = {}
    for name, work, rates in (
        ("mistral-7b", "summarisation", (1, 3, 5)),
        ("mixtral-8x7b", "summarisation", (1, 3, 5)),
        ("mistral-7b", "context-qa", (1, 2.5, 4)),
        ("mixtral-8x7b", "context-qa", (1, 2.5, 4)),
    ):
        hardware = load_hardware(name)
        title = f"Fig. 12: {hardware.title}, {work}"
        found[f"fig12-{name}-{work}"] = Sweep(title, hardware, load_workload(work), rates, (*BASELINES, *ADAPTIVE))
    return found


def _medusa() -> dict[str, Sweep]:
    a100 = load_hardware("a100-7b")
    heads = replace(a100, latency=replace(a100.latency, draft=None, draft_free_s=0.0))
    return {
        f"fig{number}": Sweep(
            f"Fig. {number}: three Medusa heads, α {alpha}",
            heads,
            load_workload("even", alpha=alpha),
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


def claims(figure: str, runs: Seq[RunFigures]) -> list[Claim]:
    """What the paper says of a figure, held against its runs."""
    makers = {
        "fig01": _fixed_lengths,
        "fig11": _never_behind,
        "fig12": _never_behind,
        "fig14": _oracle_and_random,
        "fig15": _trees,
        "fig16": _trees,
        "fig17": _confidence,
        "lengths": _lengths,
        "windows": _windows,
    }
    return [Claim(figure, *said) for said in makers[figure.split("-")[0]](runs)]


Said = list[tuple[str, str, bool]]


def _fixed_lengths(runs: Seq[RunFigures]) -> Said:
    at = {rate: latencies(runs, rate) for rate in _rates(runs)}
    slow = at[min(at)]
    best = min(BASELINES, key=slow.__getitem__)
    five, three = (_first_harm(at, name) for name in ("fixed-5", "fixed-3"))
    said = [
        (f"k = 3 or 5 is best at {min(at):g} requests/s", f"{best}: {_times(slow)}", best in ("fixed-3", "fixed-5")),
        ("k = 5 gains nothing beyond about 12 requests/s", f"worse than none from {five}", five in (12, 16)),
        ("k = 3 harms beyond about 16 requests/s", f"worse than none from {three}", three in (16, 20)),
    ]
    return [*said, *_never_behind(runs)] if "goodput" in slow else said


def _never_behind(runs: Seq[RunFigures]) -> Said:
    return [_never_behind_with(runs, name) for name in ADAPTIVE]


def _never_behind_with(runs: Seq[RunFigures], name: str) -> tuple[str, str, bool]:
    behind = worst_against_best(runs, name, BASELINES)
    gains = ", ".join(
        f"{at['none'] / at[name]:.2f}× at {rate:g}/s" for rate in _rates(runs) for at in [latencies(runs, rate)]
    )
    return (
        f"adaptive lengths ({name}) are never more than 3 % behind the best baseline",
        f"{100 * (behind - 1):+.1f} % at worst; speed-up over none {gains}",
        behind <= 1.03,
    )


def _oracle_and_random(runs: Seq[RunFigures]) -> Said:
    at = [latencies(runs, rate) for rate in _rates(runs)]
    oracle = all(found["oracle"] == min(found.values()) for found in at)
    random = all(found["goodput"] < min(found["random"], found["random-request"]) for found in at)
    gap = ", ".join(f"{found['goodput'] / found['oracle']:.2f}×" for found in at)
    drawn = ", ".join(f"{min(found['random'], found['random-request']) / found['goodput']:.2f}×" for found in at)
    return [
        (
            "nothing beats the oracle, and adaptive lengths are some way from it",
            f"goodput takes {gap} the oracle's latency",
            oracle,
        ),
        ("random lengths are worse than adaptive ones", f"the better random takes {drawn} goodput's", random),
    ]


def _trees(runs: Seq[RunFigures]) -> Said:
    behind = worst_against_best(runs, "medusa", ("none", *TREES))
    at = {rate: latencies(runs, rate) for rate in _rates(runs)}
    last = at[max(at)]
    return [
        ("adaptive trees are never behind the best fixed one", f"{100 * (behind - 1):+.1f} % at worst", behind <= 1.03),
        (
            "wide fixed trees (top-3) harm under load",
            f"top-3 takes {last['medusa-top3'] / last['none']:.2f}× of none at {max(at):g}/s",
            last["medusa-top3"] > last["none"],
        ),
    ]


def _confidence(runs: Seq[RunFigures]) -> Said:
    at = [latencies(runs, rate) for rate in _rates(runs)]
    best = [min(found["confidence"], found["confidence-0.3"]) / found["goodput"] for found in at]
    papers = [found["smartspec-confidence"] / found["smartspec"] for found in at]
    return [
        (
            f"stopping by confidence works with {name}, and is no worse",
            f"{of_what} takes {', '.join(f'{ratio:.2f}×' for ratio in ratios)} of its latency",
            max(ratios) <= 1.03,
        )
        for name, of_what, ratios in (
            ("goodput", "the better threshold", best),
            ("smartspec (Algorithm 3)", "the gated draft", papers),
        )
    ]


def _lengths(runs: Seq[RunFigures]) -> Said:
    at = [latencies(runs, rate) for rate in _rates(runs)]
    said: Said = []
    for ours, own, shared in (
        ("goodput", "goodput", "goodput-global"),
        ("smartspec", "smartspec-request", "smartspec"),
    ):
        ratios = [found[own] / found[shared] for found in at]
        seen = ", ".join(f"{ratio:.3f}×" for ratio in ratios)
        said.append(
            (
                f"global and per-request acceptance gain about the same ({ours})",
                f"by request takes {seen} of global's latency",
                all(0.95 <= r <= 1.05 for r in ratios),
            )
        )
    return said


def _windows(runs: Seq[RunFigures]) -> Said:
    at = [latencies(runs, rate) for rate in _rates(runs)]
    said: Said = []
    for name in WINDOWED:
        windows = [name.format(size) for size in WINDOWS]
        spread = max(max(own) / min(own) for found in at for own in [[found[window] for window in windows]])
        said.append(
            (
                f"the window hardly matters ({name.split(',')[0]})",
                f"the worst of {WINDOWS} takes {100 * (spread - 1):.1f} % more than the best",
                spread <= 1.03,
            )
        )
    return said


def _rates(runs: Seq[RunFigures]) -> list[float]:
    return sorted({run.rate for run in runs if run.rate is not None})


def _first_harm(at: dict[float, dict[str, float]], policy: str) -> float | None:
    """The lowest rate at which a policy takes longer than no speculation; None where it never does."""
    return next((rate for rate in sorted(at) if at[rate][policy] > at[rate]["none"]), None)


def _times(found: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in found.items())


def _fading(trials: int) -> MakePolicy:
    """Goodput with acceptance that forgets after so many trials, a request's own after a quarter of it."""

    def make(hardware: Hardware, requests: Seq[SimulatedRequest]) -> Policy:
        estimate = AcceptanceEstimate(5, memory=max(trials / 4, 5), global_memory=trials)
        return Policy("goodput", GoodputController(5, hardware.latency, acceptance=estimate))

    return make


def _moving(steps: int) -> MakePolicy:
    """SmartSpec with a moving average over so many steps."""

    def make(hardware: Hardware, requests: Seq[SimulatedRequest]) -> Policy:
        controller = SmartSpecController(5, hardware.latency, acceptance=MovingAcceptance(steps))
        return Policy("smartspec", controller)

    return make


WINDOWED = {"goodput, {} trials": _fading, "smartspec, {} steps": _moving}
