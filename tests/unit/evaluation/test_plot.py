"""The picture of several drafts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from distillspec.evaluation import (
    EvaluationResult,
    plot_comparison,
)
from distillspec.evaluation.plot import short_names


def test_the_picture_is_a_png_with_and_without_timings(result: EvaluationResult, tmp_path: Path) -> None:
    path = tmp_path / "new" / "comparison.png"
    plot_comparison([result, replace(result, draft="runs/b/draft", cost=None, speedup=None, measured=None)], path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in path.parent.iterdir()] == ["comparison.png"]


def test_names_keep_just_enough_of_the_path(result: EvaluationResult) -> None:
    other = replace(result, draft="runs/b/draft")
    assert short_names([result]) == ["draft"]
    assert short_names([result, other]) == ["a/draft", "b/draft"]
    assert short_names([result, result]) == ["1: runs/a/draft", "2: runs/a/draft"]
