"""A candidate on trial: what the held-out answers liked and live traffic does not goes back; a crash boots the old."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from distillspec.config import GateConfig
from distillspec.models import LanguageModel
from distillspec.models.draft import load_pretrained
from distillspec.serving import Engine, Request, SamplingParams
from distillspec.serving.online.canary import outcome
from distillspec.serving.online.gatekeeper import Gatekeeper
from distillspec.serving.online.layout import OnlineSettings
from distillspec.serving.online.monitor import ServedAcceptance
from distillspec.serving.online.registry import VersionRegistry
from distillspec.serving.online.replay_log import ReplayLog
from distillspec.serving.online.shadow import ServedStates, Shadow

from ..conftest import MakeEngine, prompts
from .conftest import Answer
from .test_gate import candidate, nearly_the_target

CANARY = 40


class Service:
    """An engine under a gatekeeper, and the requests it answers."""

    def __init__(self, engine: Engine, settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog) -> None:
        self.engine, self.told, self.count = engine, [], 0
        self.served = ServedAcceptance(settings.gate)
        engine.core.committer.observer = lambda emissions, logits: self.served.watch(emissions)
        self.keeper = Gatekeeper(
            settings,
            registry,
            replay,
            Shadow(engine.target, ServedStates(engine.target), settings.gate.max_gamma),
            swap=lambda version: engine.load_draft(version.path) and None,
            served=self.served,
            report=self.told.append,
        )

    told: list[dict[str, Any]]

    def serve(self, requests: int) -> None:
        for _ in range(requests):
            params = SamplingParams(max_tokens=8, ignore_eos=True, seed=self.count)
            self.engine.submit(Request(f"r{self.count}", tuple(prompts()[self.count % 6][:20]), params))
            self.count += 1
        while self.engine.has_work:
            self.served.finish(self.engine.step().finished)

    def events(self) -> list[str]:
        return [record["event"] for record in self.told]


@pytest.fixture
def registry(settings: OnlineSettings, target: LanguageModel) -> VersionRegistry:
    """A middling draft of all the target's layers is promoted."""
    made = VersionRegistry(settings.layout.versions)
    made.promote(candidate(made, nearly_the_target(target), target).name, "the beginning")
    return made


@pytest.fixture
def service(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    target: LanguageModel,
    answer: Answer,
    make_engine: MakeEngine,
) -> Service:
    """All held-out answers are of odd tokens; live traffic has all."""
    replay.append([answer(f"r{i}", split="held_out", vocabulary=range(3, 250, 2)) for i in range(12)])
    serving = registry.current()
    assert serving is not None
    engine = make_engine(load_pretrained(str(serving.path), target, target.dtype), speculation_length=2, max_slots=16)
    gate = replace(settings.gate, canary_requests=CANARY)
    made = Service(engine, replace(settings, gate=gate), registry, replay)
    made.serve(32)
    return made


def best(target: LanguageModel, spoil: Callable[[torch.Tensor], object] = lambda embeddings: None) -> LanguageModel:
    """A draft that is the target itself, but for what is done to its input embeddings `[V, D]`."""
    model = copy.deepcopy(target.model)
    with torch.no_grad():
        spoil(model.get_input_embeddings().weight)
    return replace(target, model=model)


def test_what_live_traffic_does_not_like_is_returned_within_the_canary(
    service: Service, registry: VersionRegistry, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    bad = candidate(registry, best(target, lambda embeddings: embeddings[::2].zero_()), target)
    service.keeper.work()
    assert service.keeper.canary is not None, registry.get(bad.name).reason  # the held-out answers like it
    assert service.keeper.serving == bad
    assert registry.boot() == first  # whoever starts now starts with the old one
    began = service.count
    while service.keeper.canary is not None:
        assert service.count - began < CANARY
        service.serve(8)
        service.keeper.work()
    judged = registry.get(bad.name)
    assert judged.status == "refused"
    assert "returned after a canary" in judged.reason
    assert judged.verdict["gain"]["low"] > 0
    assert service.keeper.serving == registry.current() == first
    assert service.events() == ["canary", "verdict"]
    service.serve(1)
    assert service.engine.core.proposer is not None
    assert service.engine.core.proposer.version == first.served_as


def test_what_stands_its_canary_is_promoted(service: Service, registry: VersionRegistry, target: LanguageModel) -> None:
    better = candidate(registry, best(target), target)
    service.keeper.work()
    service.serve(CANARY - 1)
    service.keeper.work()
    assert service.keeper.waiting_for == f"canary: {CANARY - 1} of {CANARY} requests"
    assert registry.get(better.name).status == "candidate"
    later = candidate(registry, best(target), target)
    service.serve(1)
    service.keeper.work()
    assert registry.current() == registry.get(better.name)
    assert "no fall of acceptance in a canary of 40 requests" in registry.get(better.name).reason
    assert registry.get(later.name).status == "candidate"  # its turn comes
    assert service.events() == ["canary", "verdict"]


def test_a_promotion_by_hand_cuts_a_canary_short(
    service: Service, registry: VersionRegistry, target: LanguageModel
) -> None:
    tried = candidate(registry, best(target), target)
    service.keeper.work()
    chosen = candidate(registry, nearly_the_target(target), target)
    registry.promote(chosen.name, "by hand")
    service.keeper.work()
    assert service.keeper.canary is None
    assert service.keeper.serving == registry.current() == registry.get(chosen.name)
    assert registry.get(tried.name).status == "inconclusive"
    assert "cut short" in registry.get(tried.name).reason


def test_a_canary_ends_though_nothing_is_drafted() -> None:
    """Where the controller drafts nothing there is nothing to lose, and nothing to wait for."""
    config = GateConfig(canary_requests=20)
    assert outcome(19, config, lambda enough: None).state == "going on"
    assert outcome(20, config, lambda enough: None).state == "passed"
    assert outcome(3, config, lambda enough: f"seen {enough}").reason.endswith("seen 20")
