"""Names of drafts among the proposers."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.config import (
    BenchCommand,
    BenchConfig,
    EngineConfig,
    GenerateCommand,
    OnlineConfig,
    QualityCommand,
    ServeCommand,
)
from distillspec.errors import ConfigError


def test_what_is_no_proposer_is_a_drafts_name() -> None:
    settings = EngineConfig(proposer=["ngram", "maths", 2024], controller="fixed")
    assert settings.proposers == ("ngram", "maths", "2024")
    assert settings.named_drafts == ("maths", "2024")
    assert settings.proposer_kinds == ("ngram", "draft_model", "draft_model")
    assert settings.joins_drafts
    assert not EngineConfig(proposer=["ngram", "maths"]).joins_drafts
    assert not EngineConfig(proposer=["ngram", "draft_model"], controller="fixed").joins_drafts


@pytest.mark.parametrize("command", [BenchCommand, GenerateCommand, QualityCommand, ServeCommand])
def test_names_without_drafts_are_refused_before_anything_is_loaded(command: Any) -> None:
    with pytest.raises(ConfigError, match="proposer=magic is not known; use one of none, draft_model"):
        command(engine=EngineConfig(proposer="magic"))


def test_names_beside_drafts_are_compared_where_the_drafts_are_found() -> None:
    engine, bench = EngineConfig(proposer=["maths"]), BenchConfig(prompts=["a.jsonl"])
    assert BenchCommand(drafts=["runs/maths"], engine=engine, bench=bench).engine.named_drafts == ("maths",)


def test_drafts_that_draft_together_do_not_learn() -> None:
    engine = EngineConfig(proposer=["maths", "sql"], controller="fixed")
    with pytest.raises(ConfigError, match=r"online=on teaches each draft .* names drafts; leave it out"):
        ServeCommand(drafts=["maths", "sql"], engine=engine, online=OnlineConfig(mode="on"))
