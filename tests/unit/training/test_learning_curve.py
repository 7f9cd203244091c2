"""Learning curves from logs: bounds on what more text and more minutes give."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from distillspec.training.learning_curve import LearningCurve


def log(run: Path, held_out: Sequence[float], text_alpha: float = 0.6) -> None:
    """Write a log of 100 steps of 10 tokens, evaluated at even distances, the last step included."""
    rows, evaluated = [], {round(100 * (i + 1) / len(held_out)): alpha for i, alpha in enumerate(held_out)}
    for step in range(1, 101):
        alpha = text_alpha if step > 90 else 0.1
        rows.append({"step": step, "tokens": 10 * step, "train/alpha": alpha + 0.01 * (-1) ** step})
        if step in evaluated:
            rows.append({"step": step, "tokens": 10 * step, "eval/alpha": evaluated[step]})
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_the_gap_to_the_training_text_and_the_rise_since_half_of_the_run_are_bounds(tmp_path: Path) -> None:
    log(tmp_path, [0.2, 0.4, 0.42, 0.5])
    curve = LearningCurve.of(tmp_path, 250)
    assert curve is not None
    assert (curve.passes, curve.held_out) == (4, 0.5)
    assert curve.text_alpha == pytest.approx(0.6)
    assert curve.gap == pytest.approx(0.1)
    assert curve.rise == pytest.approx(0.1)
    assert "read 4.0 times" in curve.line()


def test_the_rise_is_from_half_of_the_tokens_wherever_evaluations_were(tmp_path: Path) -> None:
    log(tmp_path, [0.2, 0.4, 0.5])
    curve = LearningCurve.of(tmp_path, 1000)
    assert curve is not None
    assert curve.rise == pytest.approx(0.2, abs=0.01)


@pytest.mark.parametrize(
    ("held_out", "advice"),
    [
        ((0.2, 0.45, 0.45, 0.5), "More text comes first"),
        ((0.2, 0.3, 0.5, 0.55), "More minutes come first"),
        ((0.2, 0.7, 0.7, 0.65), "Neither seems to help"),
    ],
)
def test_the_larger_bound_is_what_to_do_first(tmp_path: Path, held_out: Sequence[float], advice: str) -> None:
    log(tmp_path, held_out)
    curve = LearningCurve.of(tmp_path, 1000)
    assert curve is not None
    assert advice in curve.line()
    assert curve.to_json()["line"] == curve.line()


@pytest.mark.parametrize("held_out", [(), (0.5,)])
def test_a_run_that_was_hardly_evaluated_has_none(tmp_path: Path, held_out: Sequence[float]) -> None:
    assert LearningCurve.of(tmp_path, 100) is None
    log(tmp_path, held_out)
    assert LearningCurve.of(tmp_path, 100) is None


def test_a_run_that_samples_its_text_on_the_way_has_none(tmp_path: Path) -> None:
    log(tmp_path, [0.2, 0.4])
    assert LearningCurve.of(tmp_path, 0) is None
