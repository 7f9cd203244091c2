"""A regression in service is suspected, confirmed on held-out answers, and only then rolled back."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from distillspec.config import GateConfig
from distillspec.models import LanguageModel
from distillspec.models.draft import load_pretrained
from distillspec.serving import Request, SamplingParams
from distillspec.serving.online.gate.decision import Comparison, Decision, GateDecision, decide
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.trainer import OnlineTrainer
from distillspec.types import Interval

from ...conftest import MakeEngine, prompts
from .conftest import COSTS, candidate, feed, keeper_of, nearly_the_target, scores


def test_a_regression_after_the_gate_is_rolled_back_within_500_requests(
    settings: OnlineSettings, held_out: ReplayLog, target: LanguageModel, make_engine: MakeEngine, tmp_path: Path
) -> None:
    good = nearly_the_target(target)
    registry = VersionRegistry(settings.layout.versions, clock=lambda: 500.0)  # the held-out answers are of its time
    first = candidate(registry, good, target)
    registry.promote(first.name, "first draft")
    engine = make_engine(load_pretrained(str(first.path), target, target.dtype), speculation_length=2)
    served = ServedAcceptance(settings.gate)
    records: list[dict] = []
    keeper = keeper_of(
        settings,
        registry,
        held_out,
        target,
        swap=lambda version: engine.load_draft(version.path) and None,
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
    registry.promote(second.name, "slipped through")  # behind the gate's back
    keeper.work()
    assert keeper.serving is not None
    assert keeper.serving.name == second.name
    began = count
    while keeper.serving.name == second.name and count - began < 500:
        serve(16)
        keeper.work()
    assert keeper.serving.name == first.name
    assert registry.current() == registry.get(first.name)
    assert registry.get(second.name).status == "rolled_back"
    assert [record["event"] for record in records] == ["suspicion", "rollback"]
    assert "12 held-out requests read under both" in registry.get(second.name).reason
    serve(4)
    figures = served.figures()["versions"]
    assert set(figures) == {first.served_as, second.served_as}
    assert figures[first.served_as]["alpha"] > figures[second.served_as]["alpha"]


def test_harder_traffic_is_suspicious_and_sends_nobody_back(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel
) -> None:
    """One domain, so that no weighting separates traffic from draft, and no held-out answers to compare them on."""
    served, records = ServedAcceptance(settings.gate), []
    keeper = keeper_of(settings, registry, replay, target, served=served, report=records.append)
    base = registry.current()
    assert base is not None
    second = candidate(registry, nearly_the_target(target), target)
    for _ in range(32):
        feed(served, base.served_as, "a", 10, 8)
    registry.promote(second.name, "better")
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
    settings: OnlineSettings, registry: VersionRegistry, held_out: ReplayLog, target: LanguageModel
) -> Gatekeeper:
    """Return a gatekeeper whose second version is suspected. The test sets the verdict on it (`say`)."""
    keeper = keeper_of(settings, registry, held_out, target, served=ServedAcceptance(settings.gate))
    first, second = registry.current(), candidate(registry, nearly_the_target(target), target)
    assert first is not None
    assert keeper.served is not None
    for _ in range(32):
        feed(keeper.served, first.served_as, "a", 10, 8)
    registry.promote(second.name, "slipped through")
    keeper.follow()
    for _ in range(32):
        feed(keeper.served, second.served_as, "a", 10, 3)
    keeper.watch()
    assert keeper.suspicion is not None
    entries = held_out.entries(split="held_out")
    keeper.judge.held_out = lambda since_s=0.0: entries  # type: ignore[method-assign]
    return keeper


def say(keeper: Gatekeeper, verdict: GateDecision, meanwhile: Callable[[], object] = lambda: None) -> None:
    """Make every verdict of the judge this one. `meanwhile` is called during it."""

    def found(*given: object) -> GateDecision:
        meanwhile()
        return verdict

    keeper.judge.verdict = found  # type: ignore[method-assign]


def test_a_suspicion_ends_with_the_service_of_its_version(suspected: Gatekeeper, registry: VersionRegistry) -> None:
    registry.rollback("by hand, elsewhere")
    suspected.follow()
    suspected.watch()  # nothing was served since the last look
    assert suspected.suspicion is None


def test_acceptance_that_recovers_during_the_verdict_clears_the_version(
    suspected: Gatekeeper, registry: VersionRegistry
) -> None:
    serving, served = suspected.serving, suspected.served
    assert serving is not None
    assert served is not None

    def recover() -> None:
        for _ in range(suspected.config.window):
            feed(served, serving.served_as, "a", 10, 8)
        suspected.watch()

    say(suspected, GateDecision(serving.name, "old", "refused", "", gain=Interval(-0.2, -0.3, -0.1)), recover)
    assert suspected.check_suspicion() is not None
    assert suspected.suspicion is None
    assert registry.current() == registry.get(serving.name)
    assert registry.get(serving.name).reason == ""


def test_texts_deleted_during_the_check_do_not_put_off_the_next(suspected: Gatekeeper) -> None:
    assert suspected.suspicion is not None
    first_check, name = suspected.suspicion.next_check, suspected.suspicion.version.name
    say(suspected, GateDecision(name, "old", "inconclusive", "texts were deleted"))
    for _ in range(2):
        assert suspected.check_suspicion() is not None
        assert suspected.suspicion.next_check == first_check


@pytest.mark.parametrize(
    ("decision", "gain"), [("inconclusive", Interval(0.0, -0.1, 0.1)), ("refused", None)], ids=["unsure", "no memory"]
)
def test_a_verdict_puts_off_the_next_check_until_the_answers_have_doubled(
    suspected: Gatekeeper, decision: Decision, gain: Interval | None
) -> None:
    assert suspected.suspicion is not None
    say(suspected, GateDecision(suspected.suspicion.version.name, "old", decision, "", gain=gain))
    assert suspected.check_suspicion() is not None
    assert suspected.suspicion.next_check == 24
    assert suspected.check_suspicion() is None


class EqualDrafts:
    """Judge for which both drafts are equally good on the same text. They differ by request only."""

    def __init__(self, dice: np.random.Generator, config: GateConfig) -> None:
        self.dice, self.config, self.alphas, self.judged = dice, config, [], 0

    def log(self, alpha: float) -> None:
        pair = alpha + 0.05 * self.dice.standard_normal(2)
        self.alphas.append(tuple(pair.clip(0.01, 0.99)))

    def held_out(self, since_s: float = 0.0) -> list[SimpleNamespace]:
        return [SimpleNamespace(request_id=str(i), request=str(i), alphas=pair) for i, pair in enumerate(self.alphas)]

    def newest(self, entries: list[SimpleNamespace]) -> list[SimpleNamespace]:
        return entries[-self.config.requests :]

    def samples(self, entries: list[SimpleNamespace]) -> list[SimpleNamespace]:
        return entries

    def verdict(self, candidate: Version, incumbent: Version, samples: list[SimpleNamespace], meanwhile: object):  # type: ignore[no-untyped-def]
        self.judged += 1
        sides = [scores([float(sample.alphas[side]) for sample in samples]) for side in (0, 1)]
        return decide(candidate.name, incumbent.name, Comparison(sides[0], sides[1], COSTS), None, self.config)


def test_equal_drafts_under_a_wandering_acceptance_are_rarely_sent_back(
    settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, target: LanguageModel
) -> None:
    """The text of an hour is harder or easier than the last one's: acceptance wanders with sd .03."""
    config = GateConfig(bootstrap_samples=100)
    settings, runs = replace(settings, gate=config), 20
    first = registry.current()
    assert first is not None
    second = candidate(registry, nearly_the_target(target), target)
    checked = sent_back = 0
    for run in range(runs):
        if registry.current() != registry.get(second.name):
            registry.promote(second.name, "equal")
        dice, served, wander = np.random.default_rng(run), ServedAcceptance(config), 0.0
        judge = EqualDrafts(dice, config)
        keeper = Gatekeeper(settings, registry, judge, served=served)  # type: ignore[arg-type]
        for count in range(1000):
            wander = 0.998 * wander + 0.03 * math.sqrt(1 - 0.998**2) * dice.standard_normal()
            alpha = 0.5 + wander
            version = first if count < 400 else second
            feed(served, version.served_as, "a", 40, int(dice.binomial(40, alpha)))
            if count >= 400 and count % 10 == 0:
                judge.log(alpha)
            if count >= 400 and count % 16 == 0:
                keeper.watch()
                keeper.check_suspicion()
        checked += judge.judged > 0
        sent_back += registry.current() != registry.get(second.name)
    assert checked >= 0.4 * runs  # what used to send it back came about
    assert sent_back <= 0.05 * runs
