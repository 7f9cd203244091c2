"""Drafts, candidates and gatekeepers for the gate's tests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from distillspec.config import DraftConfig, GateConfig
from distillspec.models import LanguageModel, initialise_draft, save_draft
from distillspec.serving.online.gate.gatekeeper import Gatekeeper
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.monitor import AnswerCounts, ServedAcceptance
from distillspec.serving.online.judging.evidence import Costs, Evidence, Pair
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.state.version import Version
from distillspec.serving.online.training.scoring import Scorer
from distillspec.serving.online.training.trainer import OnlineTrainer

from ..conftest import Answer

COSTS = Costs(draft=0.1, verify=0.05)
CONFIG = GateConfig(domain_requests=4, min_requests=4, requests=60, bootstrap_samples=500)


def score(alpha: float) -> Score:
    """Return the score of a draft with this acceptance rate on 40 tokens, for γ = 1 and 2."""
    return Score((40.0, 40.0), (40 / (1 + alpha), 40 / (1 + alpha + alpha * alpha)), alpha * 40, 40)


def pairs(before: Sequence[float], after: Sequence[float], domain: str = "a", tenant: str = "t") -> list[Pair]:
    """Return conversations on which two drafts have these acceptance rates."""
    return [Pair(tenant, domain, score(old), score(new)) for old, new in zip(before, after, strict=True)]


def evidence(*found: list[Pair], costs: Costs = COSTS) -> Evidence:
    return Evidence([pair for each in found for pair in each], costs)


def nearly_the_target(target: LanguageModel, seed: int = 1) -> LanguageModel:
    """Return a draft of all the target's layers with noise on its weights."""
    made = initialise_draft(DraftConfig(layers=4), target)
    with torch.no_grad():
        for parameter in made.layers.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
    return made


@pytest.fixture
def logged(replay: ReplayLog, answer: Answer) -> ReplayLog:
    """Return a log of 48 conversations, which no version has learnt from."""
    replay.append([answer(f"r{i}") for i in range(48)])
    return replay


def keeper_of(settings: OnlineSettings, registry: VersionRegistry, replay: ReplayLog, **extra: object) -> Gatekeeper:
    judge = Judge(settings, registry, replay, ScoreTable(settings.layout.scores), lambda: COSTS)
    return Gatekeeper(settings, registry, judge, **extra)  # type: ignore[arg-type]


def scored(settings: OnlineSettings, suspected: bool = False) -> Scorer:
    """Let a trainer score all that is to be scored."""
    scorer = OnlineTrainer(settings).scorer
    while scorer.work(suspected):
        pass
    return scorer


def candidate(registry: VersionRegistry, draft: LanguageModel, target: LanguageModel) -> Version:
    current = registry.current()
    return registry.add(lambda f: save_draft(draft, f, target), parent=None if current is None else current.name)


def feed(served: ServedAcceptance, version: str, domain: str, *answers: int | tuple[int, int]) -> None:
    """Count a request's answers, each (tried, accepted). A single answer may be just the two numbers."""
    pairs = [a for a in answers if isinstance(a, tuple)] or [answers]
    served.count([AnswerCounts(domain, {version: list(pair)}) for pair in pairs])  # type: ignore[arg-type]


def promote_as_judged(registry: VersionRegistry, version: Version) -> None:
    """Promote a version as the gate does, with a verdict."""
    registry.promote(version.name, "")
    registry.judged(version.name, "promoted", {"decision": "promoted", "reason": ""}, "")
