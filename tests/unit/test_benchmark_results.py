"""Results name the code that made them, or say that they do not."""

from __future__ import annotations

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def common(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`benchmarks/common.py`, with its results in `tmp_path`."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("common")
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    return module


@pytest.mark.parametrize(
    ("commit", "changed", "why"),
    [
        ("0123", ["distillspec/sampling.py", "new.py"], "distillspec/sampling.py is not as committed (2 such files)"),
        (None, [], "the commit of the code that ran is not known"),
        ("0123", None, "the commit of the code that ran is not known"),
    ],
)
def test_a_result_of_unknown_code_is_not_to_be_quoted(
    commit: str | None,
    changed: list[str] | None,
    why: str,
    common: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "speed.json").write_text("{}")  # an honest result from before
    monkeypatch.setattr(common, "provenance", lambda *_: {"git_commit": commit})
    monkeypatch.setattr(common, "changed_files", lambda root: changed)
    common.write_result("speed", {"tokens_per_s": 1.0}, folder=tmp_path)
    assert f"DO NOT QUOTE THIS RESULT: {why}" in capsys.readouterr().err
    assert (tmp_path / "speed.json").read_text() == "{}"
    assert read(tmp_path / "speed.unquotable.json")["provenance"]["quotable"] is False


def test_a_result_of_committed_code_is(
    common: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "provenance", lambda *_: {"git_commit": "0123", "git_dirty": True})
    monkeypatch.setattr(common, "changed_files", lambda root: [])
    common.write_result("speed", {"tokens_per_s": 1.0}, folder=tmp_path)
    assert read(tmp_path / "speed.json")["provenance"] == {"git_commit": "0123", "git_dirty": False, "quotable": True}
    assert capsys.readouterr().err == ""


def test_results_of_other_benchmarks_are_no_changes_of_the_code(common: ModuleType, tmp_path: Path) -> None:
    assert common.changed_files(tmp_path) is None  # no checkout
    subprocess.run(["git", "-C", str(tmp_path), "init", "-q"], check=True)
    (tmp_path / "benchmarks" / "results").mkdir(parents=True)
    (tmp_path / "benchmarks" / "results" / "speed.json").touch()
    assert common.changed_files(tmp_path) == []
    (tmp_path / "benchmarks" / "speed.py").touch()
    assert common.changed_files(tmp_path) == ["benchmarks/"]


def test_committed_results_without_clean_provenance_are_listed() -> None:
    listed = (BENCHMARKS / "README.md").read_text().split("## Results that no commit reproduces")[1]
    for file in sorted((BENCHMARKS / "results").glob("*.json")):
        known = read(file).get("provenance") or {}
        clean = known.get("git_commit") is not None and known.get("git_dirty") is False
        assert clean != (f"`{file.name}`" in listed), file.name


def read(file: Path) -> dict[str, Any]:
    return json.loads(file.read_text())
