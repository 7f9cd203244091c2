"""A study goes on from its file only where the same code wrote it with the same settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from distillspec.files import write_json
from distillspec.recipes.spin import kept as module
from distillspec.recipes.spin.kept import PROVENANCE, SETTINGS, kept

NOW = {"distillspec": "0.1.0", "git_commit": "0123", "git_dirty": False, "started": "today"}
OWN = {"rows": (1, 8)}
FIGURES = {"trials": {"lost": 0.1}}
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(module, "provenance", lambda argv, seed: NOW)
    return tmp_path / "simulated.json"


def write(file: Path, **known: Any) -> None:
    """Write the file of an earlier run, which differs in `known` of its provenance."""
    write_json(file, {**FIGURES, SETTINGS: OWN, PROVENANCE: {**NOW, "started": "yesterday", **known}})


def test_figures_of_the_same_code_and_settings_are_kept(file: Path, capsys: Capture) -> None:
    write(file)
    assert kept(file, OWN) == {**FIGURES, SETTINGS: {"rows": [1, 8]}, PROVENANCE: NOW}
    assert capsys.readouterr().out == ""


def test_a_first_run_begins_with_nothing_and_says_nothing(file: Path, capsys: Capture) -> None:
    assert kept(file, OWN) == {SETTINGS: {"rows": [1, 8]}, PROVENANCE: NOW}
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ({"git_commit": "4567"}, "its git_commit is 4567, not 0123"),
        ({"git_commit": None}, "its git_commit is None, not 0123"),
        ({"distillspec": "0.0.9"}, "its distillspec is 0.0.9, not 0.1.0"),
        ({"git_dirty": True}, "no commit names the code that wrote it, or this code"),
    ],
)
def test_figures_of_other_code_are_made_anew(file: Path, capsys: Capture, known: dict[str, Any], why: str) -> None:
    write(file, **known)
    assert kept(file, OWN) == {SETTINGS: {"rows": [1, 8]}, PROVENANCE: NOW}
    assert capsys.readouterr().out == f"{file} is not gone on from: {why}. All its figures are made anew.\n"


def test_figures_without_provenance_or_of_other_settings_are_made_anew(file: Path, capsys: Capture) -> None:
    write_json(file, {"a100-7b-five": {"8": {"tokens_per_s": {}}}})  # as before there was any provenance
    assert "a100-7b-five" not in kept(file, OWN)
    assert "its distillspec is None" in capsys.readouterr().out
    write(file)
    assert "trials" not in kept(file, {"rows": (1,)})
    assert "it has other settings" in capsys.readouterr().out
    file.write_text("{")
    assert "trials" not in kept(file, OWN)
    assert "it is no JSON" in capsys.readouterr().out


def test_changed_code_goes_on_from_nothing(file: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    write(file)
    monkeypatch.setattr(module, "provenance", lambda argv, seed: {**NOW, "git_dirty": True})
    assert "trials" not in kept(file, OWN)
    assert "no commit names" in capsys.readouterr().out
