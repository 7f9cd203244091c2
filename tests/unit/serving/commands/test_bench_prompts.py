"""Prompt files of `distill bench` and `distill quality`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from distillspec.config import BenchConfig
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.commands.bench_prompts import read_prompts, read_questions


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_number_is_a_reference_as_text_is(tmp_path: Path, target: LanguageModel) -> None:
    file = write(tmp_path / "sums.jsonl", [{"prompt": "3 + 4?", "response": 7}, {"prompt": "1 + 1?", "response": 2}])
    found = read_prompts([file], 64, target, "quality.prompts")
    assert [(prompt.domain, prompt.response) for prompt in found] == [("sums", "7"), ("sums", "2")]


HELLO = [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("prompts", "problem"),
    [
        (["hello", None], "row 1 is NoneType, not text or messages"),
        ([12, 13], "row 0 is int, not text or messages"),
        ([["hello"]], "row 0 is not a list of messages"),
        ([HELLO, [{"role": "user", "content": None}]], "row 1 is not a list of messages"),
    ],
)
def test_a_row_that_is_no_prompt_is_named(tmp_path: Path, prompts: list[Any], problem: str) -> None:
    file = write(tmp_path / "some.jsonl", [{"prompt": prompt} for prompt in prompts])
    with pytest.raises(ConfigError, match=problem):
        read_questions(BenchConfig(prompts=[file]))


def test_a_missing_file_or_column_is_told_by_the_commands_own_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"bench.prompts=.*none.jsonl: no such file"):
        read_questions(BenchConfig(prompts=[str(tmp_path / "none.jsonl")]))
    file = write(tmp_path / "other.jsonl", [{"question": "hello"}])
    with pytest.raises(ConfigError, match=r"bench.prompts=.* has no column prompt; it has question"):
        read_questions(BenchConfig(prompts=[file]))
