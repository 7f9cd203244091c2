"""Candidates that are to join a pool: judged by what the pool gains, and refused by name where they do not fit."""

from __future__ import annotations

import pytest

from distillspec.models import LanguageModel
from distillspec.serving.online.gate.decision import GateDecision
from distillspec.serving.online.gate.judge import Judge
from distillspec.serving.online.gate.pool_comparison import PoolComparison
from distillspec.serving.online.judging.question import candidate_question
from distillspec.serving.online.judging.score_table import ScoreTable
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry

from .conftest import COSTS, candidate, nearly_the_target, scored

NEEDS = "the draft sql-specialist needs 3.00 GiB of cache for 8 slots of 2048 tokens, and 1.00 are left"


@pytest.mark.parametrize(
    ("pool", "decision"),
    [
        (PoolComparison(0.5, trials=0.01), "promoted"),
        (PoolComparison(0.01, trials=0.05), "inconclusive"),
        (PoolComparison(0.5, trials=0.01, problem=NEEDS), "refused"),
        (None, "promoted"),
    ],
)
def test_the_verdict_is_the_pools(
    settings: OnlineSettings,
    registry: VersionRegistry,
    logged: ReplayLog,
    target: LanguageModel,
    pool: PoolComparison | None,
    decision: str,
) -> None:
    candidate(registry, nearly_the_target(target), target)
    scored(settings)
    judge = Judge(settings, registry, logged, ScoreTable(settings.layout.scores), lambda: COSTS, lambda: pool)
    question = candidate_question(registry)
    assert question is not None
    found = judge.verdict(question, final=True)
    assert isinstance(found, GateDecision)
    assert found.decision == decision
    if decision == "refused":
        assert found.reason == NEEDS
    elif pool is not None:
        assert found.gain is not None
        assert found.pool == pool.interval(found.gain)
        assert "; pool " in found.reason
        assert (found.pool.low > 0) == (decision == "promoted")
    else:
        assert found.pool is None
