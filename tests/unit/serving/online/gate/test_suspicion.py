"""A regression in service is suspected, confirmed on fresh answers, and only then rolled back."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy
import pytest
import torch

from distillspec.config import GateConfig
from distillspec.models import LanguageModel
from distillspec.models.draft import load_pretrained
from distillspec.serving import Request, SamplingParams
from distillspec.serving.base.requests import CompletionOutput, RequestOutput, RequestStats
from distillspec.serving.online.gate.decision import is_worse
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.monitor import CHECK_EVERY, ServedAcceptance
from distillspec.serving.online.judging.evidence import Evidence
from distillspec.serving.online.judging.question import SUSPECTED_AFTER, suspicion_question
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.trainer import OnlineTrainer

from ...conftest import MakeEngine, prompts
from .conftest import candidate, evidence, feed, keeper_of, nearly_the_target, pairs, promote_as_judged, scored


def test_a_regression_after_the_gate_is_rolled_back_within_500_requests(
    settings: OnlineSettings, logged: ReplayLog, target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    good = nearly_the_target(target)
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)  # the answers are of its time
    first = candidate(registry, good, target)
    registry.promote(first.name, "first draft")
    engine = make_engine(load_pretrained(str(first.path), target, target.dtype), speculation_length=2)
    served = ServedAcceptance(settings.gate)
    records: list[dict] = []
    keeper = keeper_of(
        settings,
        registry,
        logged,
        swap=lambda version, acceptance: engine.load_draft(version.path, acceptance) and None,
        served=served,
        report=records.append,
    )
    engine.observer = lambda emissions, logits: served.watch(emissions)
    count = 0

    def serve(requests: int) -> None:
        nonlocal count
        for _ in range(requests):
            params = SamplingParams(max_tokens=8, ignore_eos=True, seed=count)
            engine.submit(Request(f"r{count}", tuple(prompts()[count % 6][:20]), params))
            count += 1
        while engine.has_work:
            served.finish(engine.step().finished)

    serve(48)
    worse = copy.deepcopy(good)
    with torch.no_grad():
        for parameter in worse.layers.parameters():
            parameter.zero_()
    second = candidate(registry, replace(good, model=worse.model), target)
    promote_as_judged(registry, second)
    keeper.work()
    assert keeper.serving is not None
    assert keeper.serving.name == second.name
    began = count
    while keeper.serving.name == second.name and count - began < 500:
        serve(16)
        keeper.work()
        scored(settings, suspected=keeper.suspicion is not None)
    assert keeper.serving.name == first.name
    assert registry.current() == registry.get(first.name)
    assert registry.get(second.name).status == "rolled_back"
    assert [record["event"] for record in records] == ["suspicion", "rollback"]
    assert "on the same 48 conversations since its promotion" in registry.get(second.name).reason
    serve(4)
    figures = served.figures()["versions"]
    assert set(figures) == {first.served_as, second.served_as}
    assert figures[first.served_as]["alpha"] > figures[second.served_as]["alpha"]


def test_harder_traffic_is_suspicious_and_sends_nobody_back(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel
) -> None:
    """One domain, so that no weighting separates traffic from draft, and no answers to compare them on."""
    served, records = ServedAcceptance(settings.gate), []
    keeper = keeper_of(settings, registry, replay, served=served, report=records.append)
    base = registry.current()
    assert base is not None
    second = candidate(registry, nearly_the_target(target), target)
    for _ in range(32):
        feed(served, base.served_as, "a", 10, 8)
    promote_as_judged(registry, second)
    child = candidate(registry, nearly_the_target(target, seed=2), target)
    for accepted in (3, 3, 2):
        for _ in range(32):
            feed(served, second.served_as, "a", 10, accepted)
        keeper.work()
    assert registry.current() == registry.get(second.name)
    assert keeper.serving is not None
    assert keeper.serving.name == second.name
    assert [record["event"] for record in records] == ["suspicion"]  # said once
    assert keeper.suspicion is not None
    assert registry.get(second.name).reason.startswith("suspected: acceptance 0.3")
    assert [registry.get(version.name).status for version in (base, second)] == ["retired", "promoted"]
    # What was made from it is neither refused nor given up.
    OnlineTrainer(settings).state.with_(working=child.name).write(settings.layout.state)
    assert OnlineTrainer(settings).parent() == registry.get(child.name)
    for _ in range(settings.gate.window):
        feed(served, second.served_as, "a", 10, 8)
    keeper.work()
    assert keeper.suspicion is None
    assert registry.get(second.name).reason == ""


@pytest.fixture
def suspected(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> Gatekeeper:
    """Return a gatekeeper whose second version is suspected."""
    keeper = keeper_of(settings, registry, logged, served=ServedAcceptance(settings.gate))
    first, second = registry.current(), candidate(registry, nearly_the_target(target), target)
    assert first is not None
    assert keeper.served is not None
    for _ in range(32):
        feed(keeper.served, first.served_as, "a", 10, 8)
    promote_as_judged(registry, second)
    keeper.follow()
    for _ in range(32):
        feed(keeper.served, second.served_as, "a", 10, 3)
    keeper.work()
    assert keeper.suspicion is not None
    return keeper


def test_a_suspicion_ends_with_the_service_of_its_version(suspected: Gatekeeper, registry: VersionRegistry) -> None:
    registry.rollback("by hand, elsewhere")
    suspected.work()  # nothing was served since the last look
    assert suspected.suspicion is None


def test_a_suspicion_outlives_the_trial_of_another_version(suspected: Gatekeeper, registry: VersionRegistry) -> None:
    serving = registry.current()
    suspected.try_out(registry.versions()[0].name)
    suspected.roll_back_by_hand()
    suspected.served.finish([ended()] * CHECK_EVERY)  # type: ignore[union-attr]
    suspected.work()
    assert suspected.suspicion is not None
    assert suspected.serving == registry.current() == serving


def test_acceptance_that_recovers_clears_the_version(suspected: Gatekeeper, registry: VersionRegistry) -> None:
    serving, served = suspected.serving, suspected.served
    assert serving is not None
    assert served is not None
    for _ in range(suspected.settings.gate.window):
        feed(served, serving.served_as, "a", 10, 8)
    suspected.work()
    assert suspected.suspicion is None
    assert registry.get(serving.name).reason == ""


def test_a_version_that_cannot_be_scored_any_more_is_rolled_back(
    suspected: Gatekeeper, registry: VersionRegistry
) -> None:
    serving = suspected.serving
    assert serving is not None
    suspected.judge.table.refuse(serving.name, "it cannot be judged: NaN")
    suspected.work()
    assert registry.get(serving.name).status == "rolled_back"
    assert "NaN" in registry.get(serving.name).reason


@pytest.mark.parametrize("broken", [True, False])
def test_a_version_that_nobody_judged_is_suspected_until_answers_are_read_under_it(
    settings: OnlineSettings, logged: ReplayLog, target: LanguageModel, broken: bool
) -> None:
    """Promoted by hand, and tried by nobody: n-grams are drafted in its place. Acceptance in service shows nothing."""
    good = nearly_the_target(target)
    worse = replace(good, model=copy.deepcopy(good.model))
    with torch.no_grad():
        for parameter in worse.layers.parameters():
            parameter *= 0.0 if broken else 1.0
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)  # the answers are of its time
    first = candidate(registry, good, target)
    registry.promote(first.name, "first draft")
    records: list[dict] = []
    keeper = keeper_of(settings, registry, logged, served=ServedAcceptance(settings.gate), report=records.append)
    second = candidate(registry, worse, target)
    keeper.promote_by_hand(second.name)
    for _ in range(3):
        for _ in range(CHECK_EVERY):
            keeper.served.finish([ended()])  # type: ignore[union-attr]
        keeper.work()
        scored(settings, suspected=keeper.suspicion is not None)
    keeper.served.finish([ended()] * CHECK_EVERY)  # type: ignore[union-attr]
    keeper.work()
    assert keeper.suspicion is None
    events = [record["event"] for record in records]
    assert events == ["promotion", "suspicion", "rollback"] if broken else ["promotion", "suspicion"]
    serving = registry.current()
    assert serving is not None
    assert serving.name == (first.name if broken else second.name)
    if broken:
        reason = registry.get(second.name).reason
        assert reason.startswith(f"it was promoted without a verdict; {first.name} served before; acceptance ")


def test_a_version_that_was_read_is_not_suspected_again(
    settings: OnlineSettings, logged: ReplayLog, target: LanguageModel
) -> None:
    """Its answers may have left the log since."""
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)
    for name in ("first draft", "by hand"):
        registry.promote(candidate(registry, nearly_the_target(target), target).name, name)
    records: list[dict] = []
    keeper = keeper_of(settings, registry, logged, served=ServedAcceptance(settings.gate), report=records.append)

    def look() -> None:
        keeper.served.finish([ended()] * CHECK_EVERY)  # type: ignore[union-attr]
        keeper.work()

    look()
    assert keeper.suspicion is not None
    scored(settings, suspected=True)
    look()
    assert keeper.suspicion is None
    logged.delete_tenant("default")
    look()
    assert keeper.suspicion is None
    assert [record["event"] for record in records] == ["suspicion"]


def test_a_version_that_cannot_be_compared_is_not_suspected(
    settings: OnlineSettings, logged: ReplayLog, target: LanguageModel
) -> None:
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)
    first, second = (candidate(registry, nearly_the_target(target), target) for _ in range(2))
    registry.promote(first.name, "first draft")
    registry.promote(second.name, "by hand")
    keeper = keeper_of(settings, registry, logged, served=ServedAcceptance(settings.gate))
    keeper.judge.table.refuse(first.name, "it cannot be judged: NaN")
    keeper.served.finish([ended()] * CHECK_EVERY)  # type: ignore[union-attr]
    keeper.work()
    assert keeper.suspicion is None


def test_a_version_that_the_gate_promoted_is_not_suspected(
    settings: OnlineSettings, registry: VersionRegistry, logged: ReplayLog, target: LanguageModel
) -> None:
    better = candidate(registry, nearly_the_target(target), target)
    keeper = keeper_of(settings, registry, logged, served=ServedAcceptance(settings.gate))
    scored(settings)
    verdict = keeper.judge_newest()
    assert verdict is not None
    assert verdict.decision == "promoted"
    keeper.served.finish([ended()] * CHECK_EVERY)  # type: ignore[union-attr]
    keeper.work()
    assert keeper.serving is not None
    assert keeper.serving.name == better.name
    assert keeper.suspicion is None


@pytest.mark.parametrize("judged", [True, False], ids=["the gate's verdict", "answers read since"])
def test_what_was_shown_before_proves_nothing_of_a_promotion_by_hand(
    settings: OnlineSettings, logged: ReplayLog, target: LanguageModel, small_draft: LanguageModel, judged: bool
) -> None:
    now_s = [500.0]
    registry = VersionRegistry(settings.layout.versions, clock=lambda: now_s[0])
    registry.promote(candidate(registry, small_draft, target).name, "first draft")
    better = candidate(registry, nearly_the_target(target), target)
    keeper = keeper_of(settings, registry, logged, served=ServedAcceptance(settings.gate))

    def look() -> None:
        keeper.served.finish([ended()] * CHECK_EVERY)  # type: ignore[union-attr]
        keeper.work()

    if judged:
        scored(settings)
        keeper.judge_newest()
    else:
        keeper.promote_by_hand(better.name)
        scored(settings, suspected=True)
    look()
    assert keeper.serving is not None
    assert (keeper.serving.name, keeper.suspicion) == (better.name, None)
    registry.rollback("worse in service")
    keeper.follow()
    now_s[0] = 1500.0  # later than all answers
    keeper.promote_by_hand(better.name)
    look()
    assert keeper.suspicion is not None
    assert keeper.suspicion.reason.startswith("it was promoted without a verdict")


def test_a_version_that_came_back_is_not_suspected(
    settings: OnlineSettings, logged: ReplayLog, target: LanguageModel
) -> None:
    """The second of three came by hand, and again by a rollback."""
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)
    for name in ("first draft", "by hand", "worse"):
        registry.promote(candidate(registry, nearly_the_target(target), target).name, name)
    registry.rollback("worse")
    keeper = keeper_of(settings, registry, logged, served=ServedAcceptance(settings.gate))
    keeper.served.finish([ended()] * CHECK_EVERY)  # type: ignore[union-attr]
    keeper.work()
    assert keeper.suspicion is None


def ended() -> RequestOutput:
    """Return an answer for which nothing was drafted by the model."""
    completion = CompletionOutput(0, (5, 6), "", "length", None, None, None, RequestStats())
    return RequestOutput("r", (3, 4), (completion,))


def judged_drafts(dice: numpy.random.Generator, alphas: Sequence[float], worse_by: float) -> Evidence:
    """Return conversations of these difficulties, each read under the predecessor and under the version in service."""
    spread = 0.05 * dice.standard_normal((2, len(alphas)))
    before, after = (numpy.clip(numpy.array(alphas) + own, 0.02, 0.98) for own in (spread[0], spread[1] - worse_by))
    return evidence(pairs(before.tolist(), after.tolist()))


@pytest.mark.parametrize(
    ("worse_by", "runs", "rolled_back"), [(0.0, 60, range(2)), (0.05, 40, range(38, 41))], ids=["equal", "worse"]
)
def test_versions_under_a_wandering_acceptance(worse_by: float, runs: int, rolled_back: range) -> None:
    """The text of an hour is harder or easier than the last one's: acceptance wanders with sd .03.

    A version is looked at after every request since its promotion, as long as its answers are scored.
    """
    config, count = GateConfig(), 0
    for run in range(runs):
        dice, wander, alphas = numpy.random.default_rng(run), 0.0, []
        for _ in range(config.requests):
            wander = 0.998 * wander + 0.03 * math.sqrt(1 - 0.998**2) * dice.standard_normal()
            alphas.append(0.5 + wander)
        found = judged_drafts(dice, alphas, worse_by)
        looks = [Evidence(found.pairs[:n], found.costs) for n in range(config.min_requests, config.requests + 1, 4)]
        count += any(is_worse(look, config) for look in looks)
    assert count in rolled_back


def test_a_version_that_served_well_for_long_is_asked_about_the_answers_of_now(
    suspected: Gatekeeper, registry: VersionRegistry, logged: ReplayLog
) -> None:
    serving = registry.current()
    assert serving is not None
    newest, most = logged.newest_number(), suspected.settings.gate.requests
    question = suspicion_question(registry)
    assert question is not None
    assert question.start == serving.verdict[SUSPECTED_AFTER] == max(0, newest - most)
    late = replace(question, start=newest - 2, since_s=0.0)
    assert [entry.number for entry in late.unseen(logged, most)] == [newest - 1, newest]
