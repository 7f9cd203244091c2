"""Commands and settings that the pages show are ones that `distill` takes."""

from __future__ import annotations

import dataclasses
import functools
import re
import shlex
from typing import Any, get_type_hints

import pytest

from distillspec.composition import compose
from distillspec.config import COMMANDS
from distillspec.errors import ConfigError

from .pages import HISTORY, Page, all_pages

PAGES = [page for page in all_pages() if page.name != HISTORY]
SWEEP = ("-m", "--multirun")


def shown_commands(page: Page) -> list[str]:
    """Return `distill COMMAND …` lines and code spans, except those with placeholders."""
    lines = [line.split("#")[0].strip() for line in page.command_lines]
    found = [line for line in lines if line.startswith("distill ")]
    found += [span for span in page.spans if span.startswith("distill ")]
    return [line for line in found if not re.search(r"COMMAND|…|--help|^distill train resume=", line)]


@functools.cache
def problem_of(line: str) -> str | None:
    """Return the line's refusal by `distill` before anything runs, or None."""
    _, command, *words = shlex.split(line)
    if command not in COMMANDS:
        return f"unknown command {command}"
    # The first run of a sweep. Required settings are added where the page leaves them out.
    words = [re.sub(r"^([\w.]+=[\w.-]+),.*$", r"\1", word) if set(SWEEP) & set(words) else word for word in words]
    needed = {
        "bench": "bench.prompts=[a.jsonl]",
        "eval": "drafts=[a]",
        "export": "draft.path=a",
        "quality": "quality.prompts=[a.jsonl]",
        "report": "runs=[a]",
        "train-stop": "draft.path=a",
    }
    if command in needed and not any(word.split("=")[0] == needed[command].split("=")[0] for word in words):
        words.append(needed[command])
    try:
        compose(command, words)
    except ConfigError as error:
        return str(error)
    return None


def settings(schema: Any, prefix: str = "") -> set[str]:
    """Return the dotted names of a command's settings."""
    names: set[str] = set()
    hints = get_type_hints(schema)
    for field in dataclasses.fields(schema):
        kind = hints[field.name]
        names.add(prefix + field.name)
        if dataclasses.is_dataclass(kind):
            names |= settings(kind, f"{prefix}{field.name}.")
    return names


KNOWN = set().union(*(settings(schema) for schema in COMMANDS.values()))
GROUPS = {name.split(".")[0] for name in KNOWN if "." in name}


def unknown_settings(page: Page) -> list[str]:
    """Return inline code such as `gate.margin` or `train.max_minuts=10` that names no setting of its group."""
    words = [word for span in page.spans for word in span.split()]
    keys = [match[1] for word in words if (match := re.fullmatch(r"([a-z_]+(?:\.[a-z_]+)+)(?:=.*)?", word))]
    files = (".py", ".md", ".json", ".yaml", ".jsonl", ".log", ".load", ".plan", ".explain_last_plan")
    return [key for key in keys if key.split(".")[0] in GROUPS and key not in KNOWN and not key.endswith(files)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_on_the_page_compose(page: Page) -> None:
    problems = {line: problem_of(line) for line in shown_commands(page)}
    assert {line: problem for line, problem in problems.items() if problem is not None} == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_settings_on_the_page_exist(page: Page) -> None:
    assert unknown_settings(page) == []


def test_the_pages_show_every_command() -> None:
    shown = {line.split()[1] for page in PAGES for line in shown_commands(page)}
    assert shown == set(COMMANDS)


def test_a_misspelt_command_setting_or_value_is_found(tmp_path: Any) -> None:
    file = tmp_path / "page.md"
    file.write_text(
        "x\n\n    distill train loss=none_such\n    distill trane\n\n`train.max_minuts=3` `train.max_minutes`\n"
    )
    page = Page(file)
    problems = [problem_of(line) for line in shown_commands(page)]
    assert all(problems)
    assert len(problems) == 2
    assert unknown_settings(page) == ["train.max_minuts"]
