"""A sure gain is promoted, a loss is refused, the rest waits for evidence or stays open."""

from __future__ import annotations

from dataclasses import replace

import numpy
import pytest

from distillspec.config import GateConfig
from distillspec.serving.online.gate.decision import GateDecision, decide, is_worse
from distillspec.serving.online.judging.evidence import Costs, Evidence, Pair

from .conftest import CONFIG, evidence, pairs

MIXED = [0.1 + 0.02 * i for i in range(30)]


def verdict_on(*found: list[Pair], config: GateConfig = CONFIG, place: int = 1) -> GateDecision | None:
    return decide("new", "old", evidence(*found), config, place)


def decision_on(*found: list[Pair], config: GateConfig = CONFIG, place: int = 1) -> str:
    verdict = verdict_on(*found, config=config, place=place)
    return "" if verdict is None else verdict.decision


def shifted(by: float) -> list[float]:
    return [alpha + by for alpha in MIXED]


def test_a_sure_gain_is_let_in_and_an_unsure_one_waits() -> None:
    better = verdict_on(pairs(MIXED, shifted(0.05)))
    assert better is not None
    assert better.decision == "promoted"
    assert better.gain is not None
    assert 0.01 < better.gain.low < better.gain.mean < better.gain.high
    assert better.acceptance_ratio == pytest.approx((sum(MIXED) + 1.5) / sum(MIXED))
    # The same mean gain, but of opposite signs: paired differences tell them apart, pooled ones would not.
    mixed = [alpha + (0.13 if i % 2 else -0.03) for i, alpha in enumerate(MIXED)]
    assert decision_on(pairs(MIXED, mixed)) == ""
    assert decision_on(pairs(MIXED, mixed), config=replace(CONFIG, requests=30)) == "inconclusive"
    hopeless = [alpha + (0.2 if i % 2 else -0.14) for i, alpha in enumerate(MIXED)]
    assert decision_on(pairs(MIXED, hopeless)) == "inconclusive"
    assert decision_on(pairs(MIXED, shifted(-0.05))) == "refused"
    assert decision_on(pairs(MIXED[:3], shifted(0.2)[:3])) == "", "too few"


def test_what_cannot_reach_the_margin_is_not_waited_for() -> None:
    same = verdict_on(pairs(MIXED, shifted(0.0)))
    assert same is not None
    assert same.decision == "inconclusive"
    assert "does not reach 1.0%" in same.reason
    assert decision_on(pairs(MIXED, shifted(0.05)), config=replace(CONFIG, margin=0.5)) == "inconclusive"


def test_each_candidate_in_vain_makes_the_next_promotion_harder() -> None:
    dice = numpy.random.default_rng(0)
    after = [alpha + 0.05 + 0.05 * float(dice.standard_normal()) for alpha in MIXED]
    gains = [evidence(pairs(MIXED, after)).gain(0.05 / place**2) for place in (1, 10, 100)]
    assert gains[0].low > gains[1].low > gains[2].low
    assert decision_on(pairs(MIXED, after)) == "promoted"
    assert decision_on(pairs(MIXED, after), place=100_000) == ""


@pytest.mark.parametrize("group", ["domain", "tenant"])
def test_a_sure_loss_on_a_domain_or_for_a_tenant_is_refused(group: str) -> None:
    before, after = pairs([0.3] * 55, [0.6] * 55), pairs([0.5] * 5, [0.2, 0.21, 0.22, 0.2, 0.21], **{group: "b"})
    verdict = verdict_on(before, after)
    assert verdict is not None
    assert verdict.decision == "refused"
    assert verdict.reason.endswith("on b" if group == "domain" else "on a tenant")
    few = verdict_on(before, after[:3])  # three conversations are no evidence of their own
    assert few is not None
    assert few.decision == "promoted"
    unsure = pairs([0.5] * 5, [0.3, 0.7, 0.2, 0.65, 0.5], **{group: "b"})
    assert decision_on(before, unsure) == "promoted", "a loss that is not sure protects nobody"


def test_a_better_draft_is_let_in_where_neither_is_worth_its_cost() -> None:
    dear = Costs(draft=2.0, verify=1.0)
    verdict = decide("n", "o", evidence(pairs([0.1] * 20, [0.3] * 20), costs=dear), CONFIG, 1)
    assert verdict is not None
    assert verdict.decision == "promoted"
    assert verdict.goodput is not None
    assert max(verdict.goodput) < 1


def test_one_tenants_text_rolls_nothing_back() -> None:
    loud = pairs(MIXED, shifted(-0.09), tenant="loud")
    quiet = pairs(MIXED, shifted(0.01), tenant="quiet")
    assert is_worse(evidence(loud), CONFIG), "of a server with one tenant it does"
    assert not is_worse(evidence(loud, quiet), CONFIG)
    assert not is_worse(evidence(loud, quiet[:1]), CONFIG)
    assert is_worse(evidence(loud, pairs(MIXED, shifted(-0.05), tenant="quiet")), CONFIG)


def stream(dice: numpy.random.Generator, gain: float, answers: int, spread: float) -> list[Pair]:
    """Return conversations that differ in difficulty, and in what the new draft gains on them."""
    before = dice.uniform(0.3, 0.7, answers)
    after = numpy.clip(before + gain + spread * dice.standard_t(4, answers) / 2**0.5, 0.02, 0.98)
    return pairs(before.tolist(), after.tolist())


def first_verdict(found: list[Pair], config: GateConfig, place: int) -> tuple[str, int]:
    for count in range(config.min_requests, len(found) + 1, 4):
        verdict = decide("new", "old", Evidence(found[:count], evidence().costs), config, place)
        if verdict is not None:
            return verdict.decision, count
    return "", len(found)


def test_a_hundred_candidates_that_are_no_better_are_kept_out() -> None:
    """Looked at after every fourth answer, without a margin, forty streams of a hundred equal drafts."""
    config, failed = replace(CONFIG, min_requests=24, requests=48, margin=0.0), 0
    dice = numpy.random.default_rng(1)
    for _ in range(40):
        found = [first_verdict(stream(dice, 0.0, 48, 0.03), config, place)[0] for place in range(1, 101)]
        failed += "promoted" in found
    assert failed <= 2, "five in a hundred"


def test_true_gains_are_known_within_sixty_answers() -> None:
    config, dice = replace(CONFIG, min_requests=24, requests=60), numpy.random.default_rng(2)
    found = [first_verdict(stream(dice, 0.05, 60, 0.03), config, 1) for _ in range(40)]
    assert sum(decision == "promoted" for decision, _ in found) >= 36


def test_what_cannot_be_shown_in_time_is_given_up_early() -> None:
    """Learning waits for the verdict. Few candidates that are better are given up, and most that are not."""
    config, dice = replace(CONFIG, min_requests=24, requests=120), numpy.random.default_rng(3)
    equal = [first_verdict(stream(dice, 0.0, 120, 0.05), config, 1) for _ in range(40)]
    assert {decision for decision, _ in equal} == {"inconclusive"}
    assert numpy.median([count for _, count in equal]) <= 48
    better = [first_verdict(stream(dice, 0.04, 120, 0.05), config, 1) for _ in range(40)]
    assert sum(decision == "promoted" for decision, _ in better) >= 36
