"""Run folders as `distill train` and `distill eval` leave them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from distillspec.errors import ConfigError
from distillspec.files import read_lines

Json = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """Content of one run folder. Only `summary` is required."""

    path: Path
    name: str
    command: str  # train | eval
    summary: Json
    metrics: tuple[Json, ...] = ()
    config: str = ""
    provenance: Json = field(default_factory=dict)


@dataclass(frozen=True)
class ReportEntry:
    """One evaluated draft: a row of each table and a series of each chart."""

    label: str
    result: Json  # EvaluationResult.to_json()
    run: Run
    baseline: bool = False  # a draft before distillation
    color: int = 1


def read_runs(folders: Sequence[Path]) -> list[Run]:
    """Read the folders. Each is named by the shortest ending of its path that is unique.

    Raises:
        ConfigError: a folder is missing, unfinished or unreadable. The message names it and what it lacks.
    """
    if not folders:
        raise ConfigError("there is nothing to report on: name run folders, runs=[FOLDER, FOLDER]")
    names = short_names([str(folder) for folder in folders])
    return [_read(Path(folder), name) for folder, name in zip(folders, names, strict=True)]


def entries_of(runs: Sequence[Run]) -> list[ReportEntry]:
    """Return every evaluated draft in order. Baselines are grey, the others take colours in turn."""
    drafts = short_names([str(result["draft"]) for run in runs if run.command == "eval" for result in _results(run)])
    named = iter(drafts)
    entries: list[ReportEntry] = []
    for run in runs:
        alone = len(runs) == 1
        if run.command == "train":
            if run.summary.get("before") is not None:
                label = "before" if alone else f"{run.name}, before"
                entries.append(ReportEntry(label, run.summary["before"], run, baseline=True, color=0))
            entries.append(ReportEntry("after" if alone else run.name, run.summary["after"], run))
        else:
            entries += [ReportEntry(next(named), result, run) for result in _results(run)]
    return _colored(entries)


def short_names(paths: Sequence[str]) -> list[str]:
    """Return the last component of each path, or as many as make them differ."""
    parts = [os.path.normpath(path).split(os.sep) for path in paths]
    names = list(paths)
    for length in range(1, max(map(len, parts), default=1) + 1):
        names = [os.sep.join(part[-length:]) for part in parts]
        if len(set(names)) == len(set(paths)):
            break
    return names


def _colored(entries: list[ReportEntry]) -> list[ReportEntry]:
    colored, color = [], 0
    for entry in entries:
        if not entry.baseline:
            color = color % 6 + 1
        colored.append(
            ReportEntry(entry.label, entry.result, entry.run, entry.baseline, 0 if entry.baseline else color)
        )
    return colored


def _results(run: Run) -> list[Json]:
    return run.summary["results"]


def _read(folder: Path, name: str) -> Run:
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a run folder: there is no such folder")
    summary = _json(folder, "summary.json")
    if summary is None:
        raise ConfigError(f"{folder} has no summary.json; the run has not finished, or is not a run of distillspec")
    command = summary.get("command")
    if command not in ("train", "eval"):
        raise ConfigError(f"{folder} is a run of {command!r}; reports are about train and eval runs")
    _check_results(folder, command, summary)
    config = folder / "config.yaml"
    return Run(
        folder,
        name,
        command,
        summary,
        tuple(read_lines(folder / "metrics.jsonl")),
        config.read_text(encoding="utf-8", errors="replace") if config.is_file() else "",
        _json(folder, "provenance.json") or {},
    )


def _check_results(folder: Path, command: str, summary: Json) -> None:
    if command == "train":
        results = [("after", summary.get("after"))]
        results += [("before", summary["before"])] if summary.get("before") is not None else []
    else:
        listed = summary.get("results")
        if not isinstance(listed, list) or not listed:
            raise ConfigError(f"{folder}/summary.json has no results")
        results = [(f"results[{i}]", result) for i, result in enumerate(listed)]
    for where, result in results:
        if not isinstance(result, dict):
            raise ConfigError(f"{folder}/summary.json has no {where}; the run has not been evaluated")
        lacking = [key for key in ("draft", "alpha", "tau") if not result.get(key)]
        if lacking:
            raise ConfigError(f"{folder}/summary.json: {where} lacks {', '.join(lacking)}")


def _json(folder: Path, name: str) -> Json | None:
    if not (folder / name).is_file():
        return None
    try:
        content = json.loads((folder / name).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{folder}/{name} is not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{folder}/{name} is not a JSON object")
    return content
