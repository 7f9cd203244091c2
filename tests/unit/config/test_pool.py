"""Members of a pool by folder, and by the name of a proposer without a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from distillspec.composition import compose
from distillspec.config import EngineConfig
from distillspec.config.pool import MEMBERS, with_members
from distillspec.errors import ConfigError


def test_names_of_proposers_without_a_model_are_taken_out_of_the_folders() -> None:
    folders, engine = with_members(["runs/a", "suffix", "runs/b", "ngram"], EngineConfig())
    assert folders == ["runs/a", "runs/b"]
    assert engine.proposers == ("suffix", "ngram", "draft_model")
    assert {"prompt_lookup", "suffix", "ngram"} <= set(MEMBERS)
    assert "draft_model" not in MEMBERS


def test_proposers_that_are_chosen_already_stay() -> None:
    chosen = EngineConfig(proposer=["ngram", "draft_model"])
    assert with_members(["a", "ngram", "suffix"], chosen)[1].proposers == ("suffix", "ngram", "draft_model")
    assert with_members(["a", "b"], chosen) == (["a", "b"], chosen)


def test_a_folder_of_such_a_name_is_a_path() -> None:
    assert with_members(["./suffix", Path("x/suffix")], EngineConfig())[0] == ["./suffix", Path("x/suffix")]


@pytest.mark.parametrize(
    ("drafts", "proposer", "told"),
    [
        (["suffix"], None, r"drafts=\[suffix\] names no draft; use engine.proposer=suffix"),
        (["a", "suffix", "suffix"], None, "each source without a model once"),
        (["a", "suffix"], "lookup_else_model", "lookup_else_model stands alone"),
    ],
)
def test_what_cannot_be_meant_is_refused(drafts: list[str], proposer: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        with_members(drafts, EngineConfig(proposer=proposer))


@pytest.mark.parametrize("words", ["serve", "bench bench.prompts=[p]"])
def test_commands_take_them(words: str) -> None:
    command, *others = words.split()
    config = compose(command, [*others, "drafts=[runs/a,suffix]", "engine.selection=lookup_else_model"])
    assert config.drafts == ["runs/a"]
    assert config.engine.proposers == ("suffix", "draft_model")
