"""A study's JSON file. A later run goes on from it if the same code wrote it with the same settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from distillspec.files import read_object
from distillspec.provenance import provenance

SETTINGS, PROVENANCE = "settings", "provenance"
CODE = ("distillspec", "git_commit")  # version and commit, of the provenance


def kept(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures of a file with these settings and the provenance of this run.

    Figures of other code or other settings are dropped, and a printed line says why.
    """
    record = provenance([], 0)
    json_settings = json.loads(json.dumps(settings))
    figures = dict[str, Any]()
    problem = ""
    try:
        figures = read_object(file)
    except ValueError:
        problem = "it is no JSON"
    if figures:
        problem = _problem(figures, json_settings, record)
    if problem:
        print(f"{file} is not gone on from: {problem}. All its figures are made anew.", flush=True)
        figures = {}
    return {**figures, SETTINGS: json_settings, PROVENANCE: record}


def _problem(figures: Mapping[str, Any], settings: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return why a file's figures do not belong to this run, "" if they do."""
    recorded, recorded_settings = figures.get(PROVENANCE) or {}, figures.get(SETTINGS)
    for name in CODE:
        if recorded.get(name) != record[name]:
            return f"its {name} is {recorded.get(name)}, not {record[name]}"
    if recorded.get("git_dirty") or record["git_dirty"]:
        return "no commit names the code that wrote it, or this code"
    if recorded_settings != settings:
        return "it has other settings"
    return ""
