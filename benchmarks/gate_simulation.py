"""The gate on synthetic drafts: false promotions, gains that are found, rollbacks of equal and of worse drafts.

    OMP_NUM_THREADS=1 python benchmarks/gate_simulation.py [--streams 200] [--tries 200] [--lives 120]

Acceptance is drawn by conversation (`synthetic_drafts.py`). Candidates are looked at after every fourth answer.
Rollbacks go through the gatekeeper, with suspicion, paired judgement, acquittal and renewed suspicion
(`simulated_service.py`): text and load wander slowly, and a version is watched from its promotion on. Writes
`results/gate_simulation.json`.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy
from common import write_result
from simulated_service import Life, life
from synthetic_drafts import LONGEST, pairs

from distillspec.config import GateConfig
from distillspec.serving.online.gate.decision import GateDecision, decide
from distillspec.serving.online.gate.monitor import upper_end
from distillspec.serving.online.judging.evidence import Costs, Evidence, Pair

COSTS = Costs(draft=0.1, verify=0.05)
AT_ONCE = 4  # answers between two looks
CANDIDATES = 100  # of a stream
GAINS = {"+.05 within 60": (0.05, 60), "+.02 on 60": (0.02, 60), "+.01 on 250": (0.01, 250)}  # answers
LOSS = 0.05  # of a draft that is to be rolled back
GOALS = {
    "streams with a false promotion": 0.05,
    "+.05 within 60 conclusive": 0.9,
    "equal drafts rolled back in 2,000 requests": 0.02,
    "lost .05, rolled back in 300 requests": 0.95,
}


def main() -> None:
    options, began = _options(), time.process_time()
    logging.disable(logging.CRITICAL)  # every suspicion is a warning
    figures = {
        "false_promotions": {
            "margin 0": false_promotions(options.streams, margin=0.0),
            "margin .01": false_promotions(options.streams, margin=0.01),
        },
        "gains": {name: gains(options.tries, *arguments) for name, arguments in GAINS.items()},
        "rollbacks": {
            "equal, wander .03": lives(options.lives // 2, 2000, gain=0.0, wander=0.03),
            "equal, wander .05": lives(options.lives // 2, 2000, gain=0.0, wander=0.05),
            "lost .05, wander .03": lives(options.lives, 300, gain=-LOSS, wander=0.03),
            "lost .05, wander .03, 3 tenants": lives(options.lives, 300, gain=-LOSS, wander=0.03, tenants=3),
        },
    }
    met = _met(figures)
    write_result("gate_simulation", {**figures, "goals": GOALS, "met": met, "cpu_s": time.process_time() - began})


def false_promotions(streams: int, margin: float) -> dict[str, Any]:
    """Count the streams of equal candidates in which at least one is promoted."""
    config = GateConfig(margin=margin, speculation_length=LONGEST)
    promoted = [false_promotions_of(seed, config) for seed in range(streams)]
    return {"candidates": CANDIDATES, "promotions": sum(promoted), **share([count > 0 for count in promoted])}


def false_promotions_of(seed: int, config: GateConfig, candidates: int = CANDIDATES) -> int:
    """Return how many of the equal candidates of a stream are promoted."""
    dice = numpy.random.default_rng(seed)
    attempt = 1
    promoted = 0
    for _ in range(candidates):
        verdict = first_verdict(partial(pairs, dice, gain=0.0), config, attempt)
        is_promoted = verdict.decision == "promoted"
        promoted += is_promoted
        attempt = 1 if is_promoted else attempt + 1
    return promoted


def gains(tries: int, gain: float, answers: int) -> dict[str, Any]:
    """Return what is decided on candidates that are better, with the default margin and without one."""
    by_margin = {}
    for name, margin in (("margin 0", 0.0), ("margin .01", 0.01)):
        config = GateConfig(requests=answers, margin=margin, speculation_length=LONGEST)
        verdicts = []
        for seed in range(tries):
            draw = partial(pairs, numpy.random.default_rng(seed), gain=gain)
            verdicts.append(first_verdict(draw, config, 1))
        by_margin[name] = {
            "decisions": Counter(verdict.decision for verdict in verdicts),
            "median_answers": median(verdict.requests for verdict in verdicts),
            "promoted": share([verdict.decision == "promoted" for verdict in verdicts]),
        }
    return by_margin


def first_verdict(draw: Callable[[int], Sequence[Pair]], config: GateConfig, attempt: int) -> GateDecision:
    """Return the verdict on a candidate, looked at after every few answers.

    Args:
        draw: returns so many further conversations.
    """
    conversations = list(draw(config.min_requests))
    while True:
        final = len(conversations) >= config.requests
        verdict = decide("new", "old", Evidence(conversations, COSTS), config, attempt, final=final)
        if verdict is not None:
            return verdict
        conversations += draw(min(AT_ONCE, config.requests - len(conversations)))


def lives(count: int, requests: int, gain: float, wander: float, tenants: int = 1) -> dict[str, Any]:
    """Return how promoted versions fare, each in a separate service."""
    outcomes: list[Life] = []
    for seed in range(count):
        with tempfile.TemporaryDirectory() as folder:
            outcomes.append(life(Path(folder), seed, gain, wander, requests, tenants))
    back = [outcome.requests for outcome in outcomes if outcome.rolled_back]
    return {
        "requests": requests,
        "rolled_back": share([outcome.rolled_back for outcome in outcomes]),
        "median_requests_to_rollback": median(back) if back else None,
        "suspected": share([outcome.suspicions > 0 for outcome in outcomes]),
        "suspicions": sum(outcome.suspicions for outcome in outcomes),
        "acquittals": sum(outcome.acquittals for outcome in outcomes),
    }


def share(happened: Sequence[bool]) -> dict[str, Any]:
    """Return the share of the cases, and what it is below with 95 %."""
    count, cases = sum(happened), len(happened)
    return {"count": count, "of": cases, "share": count / cases, "at_most": upper_end(count, cases)}


def _met(figures: dict[str, Any]) -> dict[str, bool]:
    streams = figures["false_promotions"]
    better = figures["gains"]
    rollbacks = figures["rollbacks"]
    equal = [rollbacks[name]["rolled_back"] for name in rollbacks if name.startswith("equal")]
    lost = [rollbacks[name]["rolled_back"]["share"] for name in rollbacks if name.startswith("lost")]
    values = (
        max(outcome["share"] for outcome in streams.values()) <= 0.05,
        better["+.05 within 60"]["margin .01"]["promoted"]["share"] >= 0.9,
        sum(outcome["count"] for outcome in equal) <= 0.02 * sum(outcome["of"] for outcome in equal),
        min(lost) >= 0.95,
    )
    return dict(zip(GOALS, values, strict=True))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--tries", type=int, default=200)
    parser.add_argument("--lives", type=int, default=120)
    return parser.parse_args()


if __name__ == "__main__":
    main()
