"""Scores in the trainer's process: what keeps them from being written says nothing of a draft."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from distillspec.models import LanguageModel, save_draft
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.log.replay_log import ReplayLog
from distillspec.serving.online.state.database import DatabaseFailed
from distillspec.serving.online.state.layout import OnlineSettings
from distillspec.serving.online.state.registry import VersionRegistry
from distillspec.serving.online.training.trainer import OnlineTrainer

from ..conftest import Answer
from .conftest import fill


def test_a_table_that_cannot_be_written_refuses_no_draft(
    settings: OnlineSettings,
    registry: VersionRegistry,
    replay: ReplayLog,
    answer: Answer,
    small_draft: LanguageModel,
    target: LanguageModel,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fill(replay, answer, 4)
    made = registry.add(lambda folder: save_draft(small_draft, folder, target))
    scorer = OnlineTrainer(settings).scorer
    add = scorer.table.add

    def full_once(version: str, scores: Mapping[int, Score]) -> None:
        if version == made.name:
            raise DatabaseFailed("cannot read or write scores.sqlite: database or disk is full")
        add(version, scores)

    with monkeypatch.context() as full:
        full.setattr(scorer.table, "add", full_once)
        with pytest.raises(DatabaseFailed):
            scorer.work(suspected=False)
    assert scorer.table.problem(made.name) is None
    assert scorer.work(suspected=False) == 4
    assert len(scorer.table.of(made.name)) == 4
