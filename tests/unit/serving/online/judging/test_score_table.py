"""Scores by version and answer."""

from __future__ import annotations

from pathlib import Path

from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.judging.score_table import ScoreTable


def test_the_newest_answer_is_that_of_any_version(tmp_path: Path) -> None:
    """Numbers of a log that was removed must not come again while scores are kept by them."""
    table, score = ScoreTable(tmp_path / "scores.sqlite"), Score((1.0,), (1.0,), 0.5, 1)
    assert table.newest_answer() == 0
    table.add("v00001", {7: score})
    table.add("v00002", {3: score})
    assert table.newest_answer() == 7
