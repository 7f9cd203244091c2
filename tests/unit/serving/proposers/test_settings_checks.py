"""Proposers that settings name, against the drafts that there are."""

from __future__ import annotations

from typing import Any

import pytest

from distillspec.config import EngineConfig
from distillspec.errors import ConfigError
from distillspec.serving.proposers.settings_checks import check_named, check_proposer


@pytest.mark.parametrize(
    ("options", "drafts", "named"),
    [
        ({"longest": 2}, ["draft"], "longest"),
        ({"ngrm": {}}, ["draft"], "ngrm"),
        ({"ngram": {"least": 0.1}}, ["a", "b"], "ngram"),
    ],
)
def test_options_of_no_proposer_are_refused(options: dict[str, Any], drafts: list[str], named: str) -> None:
    with pytest.raises(ConfigError, match=rf"proposer_options.*{named}"):
        check_proposer(EngineConfig(proposer_options=options), drafts=drafts)
    check_proposer(EngineConfig(proposer_options={"ngram": {"longest": 2}}), drafts=["draft"])


@pytest.mark.parametrize(
    ("proposer", "drafts", "told"),
    [
        ("magic", [], r"proposer=magic is not known; use one of none, .*, or name drafts of drafts=\[A,B\]$"),
        (["a", "c"], ["a", "b"], "proposer=c is not known; use one of none, .*, or a draft: a, b$"),
        ("a", ["draft"], "proposer=a is not known"),
        (["ngram", "b"], ["a", "b"], r"proposer=\['ngram', 'b'\] does not name the draft a, which would draft nothing"),
    ],
)
def test_names_are_those_of_all_drafts(proposer: Any, drafts: list[str], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        check_proposer(EngineConfig(proposer=proposer), drafts=drafts)


@pytest.mark.parametrize("proposer", [None, "draft_model", ["suffix", "draft_model"], ["b", "suffix", "a"]])
def test_several_drafts_need_not_be_named(proposer: Any) -> None:
    check_named(EngineConfig(proposer=proposer), ["a", "b"])
