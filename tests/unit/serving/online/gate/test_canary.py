"""A candidate on a canary: worse live acceptance takes it back, and a crash boots the incumbent."""

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
from distillspec.serving.online.gate.canary import outcome
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import CandidateJudge
from distillspec.serving.online.gate.monitor import ServedAcceptance
from distillspec.serving.online.gate.shadow import ServedStates, Shadow
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from ...conftest import MakeEngine, prompts
from ..conftest import Answer
from .conftest import candidate, nearly_the_target

CANARY = 40


class Service:
    """An engine under a gatekeeper, and the requests it answers."""

    def __init__(self, engine: Engine, settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog) -> None:
        self.engine, self.records, self.count = engine, [], 0
        self.served = ServedAcceptance(settings.gate)
        engine.observer = lambda emissions, logits: self.served.watch(emissions)
        shadow = Shadow(engine.target, ServedStates(engine.target), settings.gate.max_gamma)
        self.keeper = Gatekeeper(
            settings,
            registry,
            CandidateJudge(settings, registry, replay, shadow),
            swap=lambda version: engine.load_draft(version.path) and None,
            served=self.served,
            report=self.records.append,
        )

    records: list[dict[str, Any]]

    def serve(self, requests: int) -> None:
        for _ in range(requests):
            params = SamplingParams(max_tokens=8, ignore_eos=True, seed=self.count)
            self.engine.submit(Request(f"r{self.count}", tuple(prompts()[self.count % 6][:20]), params))
            self.count += 1
        while self.engine.has_work:
            self.served.finish(self.engine.step().finished)

    def events(self) -> list[str]:
        return [record["event"] for record in self.records]


@pytest.fixture
def registry(settings: OnlineSettings, target: LanguageModel) -> VersionRegistry:
    """A middling draft of all the target's layers is promoted."""
    made = VersionRegistry(settings.layout.versions)
    made.promote(candidate(made, nearly_the_target(target), target).name, "first draft")
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
    """Return a service whose held-out answers have odd tokens only, unlike its traffic."""
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


def test_a_candidate_that_is_worse_on_live_traffic_is_taken_back_within_its_canary(
    service: Service, registry: VersionRegistry, target: LanguageModel
) -> None:
    first = registry.current()
    assert first is not None
    bad = candidate(registry, best(target, lambda embeddings: embeddings[::2].zero_()), target)
    service.keeper.work()
    assert service.keeper.canary is not None, registry.get(bad.name).reason  # better on the held-out answers
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
    assert service.engine.proposer is not None
    assert service.engine.draft_version == first.served_as


def test_a_candidate_that_passes_its_canary_is_promoted(
    service: Service, registry: VersionRegistry, target: LanguageModel
) -> None:
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
    """A controller that drafts nothing risks nothing, so the canary passes after its requests."""
    config = GateConfig(canary_requests=20)
    assert outcome(19, config, lambda enough: None).state == "going on"
    assert outcome(20, config, lambda enough: None).state == "passed"
    assert outcome(3, config, lambda enough: f"of {enough}").reason.endswith("of 20")
