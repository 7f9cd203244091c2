"""What a command that measures an engine refuses before minutes are spent."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from distillspec.config.engine import EngineConfig
from distillspec.errors import ConfigError
from distillspec.models.checkpoint import METADATA
from distillspec.serving.commands.measured_engine import (
    check_grows,
    check_no_store,
    check_speculates,
    find_named,
    fitting,
)
from distillspec.types import Prompt


@pytest.mark.parametrize(
    "settings",
    [
        {"proposer": "suffix", "proposer_options": {"folder": "answers"}},
        {"proposer": ["suffix", "draft_model"], "proposer_options": {"suffix": {"folder": "answers"}}},
    ],
)
def test_a_servers_answers_are_left_alone(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"folder=answers holds the answers of a server"):
        check_no_store(EngineConfig(**settings))
    check_no_store(EngineConfig(proposer="suffix", proposer_options={"tokens": 1000}))


def engine(**known: Any) -> Any:
    return SimpleNamespace(**known)


def test_an_engine_that_drafts_nothing_has_nothing_to_compare() -> None:
    check_speculates(engine(proposer=object()))
    with pytest.raises(ConfigError, match=r"nothing drafts here.*draft\.path=RUN"):
        check_speculates(engine(proposer=None))


def test_prompts_leave_room_for_an_answer() -> None:
    prompts = [Prompt("short", (1,) * 9), Prompt("long", (1,) * 10)]
    assert fitting(prompts, engine(max_model_len=10), "bench.prompts") == prompts[:1]
    with pytest.raises(ConfigError, match=r"bench\.prompts: no prompt is shorter than engine\.max_model_len=9"):
        fitting(prompts, engine(max_model_len=9), "bench.prompts")


def test_trees_that_a_draft_grows_need_a_draft() -> None:
    with pytest.raises(ConfigError, match=r"policy topk-3-2 says how a draft model grows trees.*draft\.path=RUN"):
        check_grows("topk-3-2", EngineConfig(), engine(proposer=None))


def test_drafts_are_named_as_their_folders_are(tmp_path: Path) -> None:
    paths = [tmp_path / "maths", tmp_path / "sql" / "draft"]
    for folder in paths:
        folder.mkdir(parents=True)
        (folder / METADATA).write_text("{}")
    given = [str(tmp_path / "maths"), str(tmp_path / "sql")]
    assert find_named(EngineConfig(proposer=["sql", "ngram", "maths"]), given) == paths
    assert find_named(EngineConfig(), given) == paths
    with pytest.raises(ConfigError, match=r"proposer=chat is not known; use one of none, .*, or a draft: maths, sql"):
        find_named(EngineConfig(proposer=["sql", "chat"]), given)
