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

    Figures of other code or other settings are left out, and a line says why.
    """
    record, own = provenance([], 0), json.loads(json.dumps(settings))
    found, problem = dict[str, Any](), ""
    try:
        found = read_object(file)
    except ValueError:
        problem = "it is no JSON"
    if found:
        problem = _problem(found, own, record)
    if problem:
        print(f"{file} is not gone on from: {problem}. All its figures are made anew.", flush=True)
        found = {}
    return {**found, SETTINGS: own, PROVENANCE: record}


def _problem(found: Mapping[str, Any], settings: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Return why a file's figures do not belong to this run, "" if they do."""
    known, asked = found.get(PROVENANCE) or {}, found.get(SETTINGS)
    for name in CODE:
        if known.get(name) != record[name]:
            return f"its {name} is {known.get(name)}, not {record[name]}"
    if known.get("git_dirty") or record["git_dirty"]:
        return "no commit names the code that wrote it, or this code"
    if asked != settings:
        return "it has other settings"
    return ""
