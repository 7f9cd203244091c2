"""Statements of the paper about its latency figures, compared with simulated runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from distillspec.recipes.smartspec.latency_figures import ADAPTIVE, BASELINES, TREES, WINDOWED, WINDOWS
from distillspec.recipes.smartspec.sweeps import latencies, worst_against_best
from distillspec.serving.simulation.figures import RunFigures


@dataclass(frozen=True)
class Claim:
    """A statement of the paper, the result here, and whether they agree."""

    figure: str
    claim: str
    seen: str
    holds: bool


def claims(figure: str, runs: Sequence[RunFigures]) -> list[Claim]:
    """Compare what the paper says of a figure with its runs."""
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
    return [Claim(figure, *finding) for finding in makers[figure.split("-")[0]](runs)]


Findings = list[tuple[str, str, bool]]  # (claim, seen, holds)


def _fixed_lengths(runs: Sequence[RunFigures]) -> Findings:
    by_rate = {rate: latencies(runs, rate) for rate in _rates(runs)}
    slow = by_rate[min(by_rate)]
    best = min(BASELINES, key=slow.__getitem__)
    five, three = (_first_harm(by_rate, name) for name in ("fixed-5", "fixed-3"))
    findings = [
        (
            f"k = 3 or 5 is best at {min(by_rate):g} requests/s",
            f"{best}: {_times(slow)}",
            best in ("fixed-3", "fixed-5"),
        ),
        ("k = 5 gains nothing beyond about 12 requests/s", f"worse than none from {five}", five in (12, 16)),
        ("k = 3 harms beyond about 16 requests/s", f"worse than none from {three}", three in (16, 20)),
    ]
    return [*findings, *_never_behind(runs)] if "goodput" in slow else findings


def _never_behind(runs: Sequence[RunFigures]) -> Findings:
    return [_never_behind_with(runs, name) for name in ADAPTIVE]


def _never_behind_with(runs: Sequence[RunFigures], name: str) -> tuple[str, str, bool]:
    behind = worst_against_best(runs, name, BASELINES)
    by_rate = {rate: latencies(runs, rate) for rate in _rates(runs)}
    gains = ", ".join(f"{latency['none'] / latency[name]:.2f}× at {rate:g}/s" for rate, latency in by_rate.items())
    return (
        f"adaptive lengths ({name}) are never more than 3 % behind the best baseline",
        f"{100 * (behind - 1):+.1f} % at worst; speed-up over none {gains}",
        behind <= 1.03,
    )


def _oracle_and_random(runs: Sequence[RunFigures]) -> Findings:
    at_rates = [latencies(runs, rate) for rate in _rates(runs)]
    oracle = all(latency["oracle"] == min(latency.values()) for latency in at_rates)
    gap = ", ".join(f"{latency['goodput'] / latency['oracle']:.2f}×" for latency in at_rates)
    random_over_goodput = [
        min(latency["random"], latency["random-request"]) / latency["goodput"] for latency in at_rates
    ]
    drawn = ", ".join(f"{ratio:.2f}×" for ratio in random_over_goodput)
    random = all(latency["goodput"] < min(latency["random"], latency["random-request"]) for latency in at_rates)
    return [
        (
            "nothing beats the oracle, and adaptive lengths are some way from it",
            f"goodput takes {gap} the oracle's latency",
            oracle,
        ),
        ("random lengths are worse than adaptive ones", f"the better random takes {drawn} goodput's", random),
    ]


def _trees(runs: Sequence[RunFigures]) -> Findings:
    behind = worst_against_best(runs, "medusa", ("none", *TREES))
    by_rate = {rate: latencies(runs, rate) for rate in _rates(runs)}
    last = by_rate[max(by_rate)]
    return [
        ("adaptive trees are never behind the best fixed one", f"{100 * (behind - 1):+.1f} % at worst", behind <= 1.03),
        (
            "wide fixed trees (top-3) harm under load",
            f"top-3 takes {last['medusa-top3'] / last['none']:.2f}× of none at {max(by_rate):g}/s",
            last["medusa-top3"] > last["none"],
        ),
    ]


def _confidence(runs: Sequence[RunFigures]) -> Findings:
    at_rates = [latencies(runs, rate) for rate in _rates(runs)]
    best = [min(latency["confidence"], latency["confidence-0.3"]) / latency["goodput"] for latency in at_rates]
    papers = [latency["smartspec-confidence"] / latency["smartspec"] for latency in at_rates]
    return [
        (
            f"stopping by confidence works with {name}, and is no worse",
            f"{variant} takes {', '.join(f'{ratio:.2f}×' for ratio in ratios)} of its latency",
            max(ratios) <= 1.03,
        )
        for name, variant, ratios in (
            ("goodput", "the better threshold", best),
            ("smartspec (Algorithm 3)", "the gated draft", papers),
        )
    ]


def _lengths(runs: Sequence[RunFigures]) -> Findings:
    at_rates = [latencies(runs, rate) for rate in _rates(runs)]
    findings: Findings = []
    for controller, per_request, shared in (
        ("goodput", "goodput", "goodput-global"),
        ("smartspec", "smartspec-request", "smartspec"),
    ):
        ratios = [latency[per_request] / latency[shared] for latency in at_rates]
        seen = ", ".join(f"{ratio:.3f}×" for ratio in ratios)
        findings.append(
            (
                f"global and per-request acceptance gain about the same ({controller})",
                f"by request takes {seen} of global's latency",
                all(0.95 <= ratio <= 1.05 for ratio in ratios),
            )
        )
    return findings


def _windows(runs: Sequence[RunFigures]) -> Findings:
    at_rates = [latencies(runs, rate) for rate in _rates(runs)]
    findings: Findings = []
    for name in WINDOWED:
        windows = [name.format(size) for size in WINDOWS]
        by_window = [[latency[window] for window in windows] for latency in at_rates]
        spread = max(max(latency_s) / min(latency_s) for latency_s in by_window)
        findings.append(
            (
                f"the window hardly matters ({name.split(',')[0]})",
                f"the worst of {WINDOWS} takes {100 * (spread - 1):.1f} % more than the best",
                spread <= 1.03,
            )
        )
    return findings


def _rates(runs: Sequence[RunFigures]) -> list[float]:
    return sorted({run.rate for run in runs if run.rate is not None})


def _first_harm(by_rate: dict[float, dict[str, float]], policy: str) -> float | None:
    """Return the lowest rate at which a policy takes longer than no speculation, None if it never does."""
    return next((rate for rate in sorted(by_rate) if by_rate[rate][policy] > by_rate[rate]["none"]), None)


def _times(latency: dict[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in latency.items())
