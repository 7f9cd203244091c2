"""Runs of a study: finished ones have a summary, interrupted ones go on."""

from __future__ import annotations

from pathlib import Path

from distillspec.recipes.runs import resumable, summary_of


def test_a_run_is_finished_when_its_summary_is_there(tmp_path: Path) -> None:
    assert summary_of(tmp_path / "run") is None
    (tmp_path / "summary.json").write_text('{"minutes": 3}')
    assert summary_of(tmp_path) == {"minutes": 3}


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    command = ["train", "target=tiny"]
    assert resumable(command, tmp_path) == command
    (tmp_path / ".hydra").mkdir()
    (tmp_path / ".hydra" / "overrides.yaml").write_text("[]\n")
    assert resumable(command, tmp_path) == ["train", f"resume={tmp_path}"]
