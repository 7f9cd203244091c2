"""Prompts of `distill bench` and `distill quality`: files as tokens for an engine, or as messages for servers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from distillspec.config import BenchConfig, DataConfig
from distillspec.data.chat import render_prompt
from distillspec.data.prompts import check_content, read_rows, response_text
from distillspec.errors import ConfigError
from distillspec.models import LanguageModel
from distillspec.serving.bench.load import Question
from distillspec.types import Prompt

P = TypeVar("P")


class _Row(NamedTuple):
    id: str
    content: Any  # a text, or messages
    domain: str
    response: str | None


def read_prompts(files: Sequence[str], longest: int, target: LanguageModel, key: str) -> list[Prompt]:
    """Read the files' prompts in the target's chat template, files by turns.

    Args:
        longest: tokens of a prompt. Longer ones are left out.
        key: the setting that names the files.

    Raises:
        ConfigError: a file cannot be read, has a row that is no prompt, or no prompt that is short enough.
    """

    def made(rows: Sequence[_Row]) -> list[Prompt]:
        prompts = [
            Prompt(row.id, render_prompt(target.text_tokenizer, row.content), row.domain, row.response) for row in rows
        ]
        return [prompt for prompt in prompts if 0 < len(prompt.token_ids) <= longest]

    return _in_turn(files, made, key, f"no prompt of at most {longest} tokens")


def read_questions(config: BenchConfig) -> list[Question]:
    """Read the files' prompts as messages, one of each file in turn.

    Raises:
        ConfigError: a file cannot be read, has a row that is no prompt, or is empty.
    """

    def made(rows: Sequence[_Row]) -> list[Question]:
        return [Question.of(row.id, row.content, row.domain) for row in rows]

    return _in_turn(config.prompts, made, "bench.prompts", "no prompt")


def _in_turn(files: Sequence[str], prompts_of: Callable[[Sequence[_Row]], list[P]], key: str, lacking: str) -> list[P]:
    """Return as many prompts of each file, files by turns. `lacking` describes a file without any."""
    groups = [prompts_of(_rows(file, key)) for file in files]
    for file, group in zip(files, groups, strict=True):
        if not group:
            raise ConfigError(f"{key}: {file} has {lacking}")
    return [prompt for turn in zip(*groups, strict=False) for prompt in turn]


def _rows(file: str, key: str) -> list[_Row]:
    return [_row(row, number, file, key) for number, row in enumerate(read_rows(DataConfig(prompts=file), key))]


def _row(row: dict[str, Any], number: int, file: str, key: str) -> _Row:
    check_content(row["prompt"], f"{key}: {file}: row {number}")
    domain, response = str(row.get("domain") or Path(file).stem), response_text(row.get("response"))
    return _Row(str(row.get("id", number)), row["prompt"], domain, response)
