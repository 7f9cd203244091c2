"""Drafts, candidates and gatekeepers for the gate's tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from distillspec.config import DraftConfig, GateConfig
from distillspec.evaluation import TargetStates
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving.online.gate.decision import Costs
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import CandidateJudge
from distillspec.serving.online.gate.monitor import AnswerCounts, ServedAcceptance
from distillspec.serving.online.gate.shadow import Score, ServedStates, Shadow
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version

from ..conftest import Answer

COSTS = Costs(draft=0.1, verify=0.05)
CONFIG = GateConfig(domain_requests=4, bootstrap_samples=500)


def scores(alphas: list[float], domain: str = "a") -> list[Score]:
    """Return the scores of drafts with these acceptance rates on 40 tokens each, for γ = 1 and 2."""
    made = []
    for a in alphas:
        tokens, blocks = 40.0, (40 / (1 + a), 40 / (1 + a + a * a))
        made.append(Score(domain, (tokens, tokens), blocks, a * 40, 40))
    return made


def nearly_the_target(target: LanguageModel, seed: int = 1) -> LanguageModel:
    """Return a draft of all the target's layers with noise on its weights."""
    made = initialise_draft(DraftConfig(layers=4), target)
    with torch.no_grad():
        for parameter in made.layers.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return made


@pytest.fixture
def held_out(replay: ReplayLog, answer: Answer) -> ReplayLog:
    replay.append([answer(f"r{i}", split="held_out") for i in range(12)])
    return replay


def keeper_of(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    target: LanguageModel,
    costs: Callable[[LanguageModel], Costs] | None = None,
    **extra: object,
) -> Gatekeeper:
    states = ServedStates(target) if "swap" in extra and "served" in extra else TargetStates(target)
    shadow = Shadow(target, states, settings.gate.max_gamma)
    judge = CandidateJudge(settings, registry, replay, shadow, costs)
    return Gatekeeper(settings, registry, judge, **extra)  # type: ignore[arg-type]


def candidate(registry: VersionRegistry, draft: LanguageModel, target: LanguageModel) -> Version:
    current = registry.current()
    return registry.add(lambda f: save_draft(draft, f, target), parent=None if current is None else current.name)


def feed(served: ServedAcceptance, version: str, domain: str, *answers: int | tuple[int, int]) -> None:
    """Count a request's answers, each (tried, accepted). A single answer may be just the two numbers."""
    pairs = [a for a in answers if isinstance(a, tuple)] or [answers]
    served.count([AnswerCounts(domain, {version: list(pair)}) for pair in pairs])  # type: ignore[arg-type]
