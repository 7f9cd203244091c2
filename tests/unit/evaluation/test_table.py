"""The table of several drafts, and their comparison prompt by prompt."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from distillspec.evaluation import (
    EvaluationResult,
    StepCost,
    compare_pairs,
    comparison_text,
    predict_speedup,
)
from distillspec.evaluation.acceptance import PromptSums
from distillspec.types import Interval


def test_the_table_names_policy_figures_and_verdict_with_the_best_draft_first(
    result: EvaluationResult,
) -> None:
    worse = replace(result, draft="runs/b/draft", alpha=Interval(0.2, 0.1, 0.3), cost=None, speedup=None, measured=None)
    text = comparison_text([worse, result])
    assert "temperature 0.8, top-p 0.9" in text
    row = next(line for line in text.splitlines() if "runs/a/draft" in line)
    for figure in (
        "0.510 [0.470, 0.550]",
        "0.970",
        "1.90 [1.70, 2.00]",
        "0.100",
        "1.36x [1.36, 1.36]",
        "1.30 [1.20, 1.40] at γ=2",
    ):
        assert figure in row
    assert text.index("runs/a/draft") < text.index("runs/b/draft")
    assert "runs/a/draft, batch 1: Draft 2 tokens a step" in text
    assert "τ counts the target's own token of each pass: τ − 1 drafted tokens are accepted" in text


def test_a_length_that_is_not_surely_faster_is_not_recommended(result: EvaluationResult) -> None:
    cost = StepCost(1, 0.1, (1.0, 1.1, 1.2))
    noise = 1 + 0.3 * np.random.default_rng(0).standard_normal((1000, 1))
    unsure = predict_speedup([1.25, 1.5], cost, np.array([1.25, 1.5]) * noise)
    assert result.measured is not None
    measured = replace(result.measured, ratio=Interval(1.02, 0.9, 1.1), served=Interval(1.4, 1.2, 1.6))
    at = {8: replace(measured, prompts=6)}
    text = comparison_text([replace(result, speedup={1: unsure}, measured=measured, measured_at=at, cut=0.73)])
    row = next(line for line in text.splitlines() if "runs/a/draft" in line)
    assert "too close to call" in row
    assert "batch 1: Too close to call" in text
    assert "measured: decoding with 2 drafted ran at 1.02 [0.90, 1.10] times plain decoding: too close to call." in text
    assert "lengths by goodput, ran at 1.40 [1.20, 1.60] times plain decoding: faster." in text
    assert "decoding 8 at a time with 2 drafted ran at 1.02 [0.90, 1.10] times plain decoding on 6 groups of 8" in text
    assert "73% of the held-out answers were cut at the token limit" in text


def test_drafts_are_compared_prompt_by_prompt(result: EvaluationResult) -> None:
    """Prompts differ widely, the drafts by little and always in the same direction."""

    def judged(draft: str, more: float) -> EvaluationResult:
        sums = [
            PromptSums("d", 100, np.array([10.0 * i + more, 0, 0, 0]), np.array([50.0 + i + more]), np.array([50.0]))
            for i in range(8)
        ]
        return replace(result, draft=draft, tau=result.tau[:1], by_prompt=tuple(sums))

    worse, better = judged("a", 0.0), judged("b", 1.0)
    (pair,) = compare_pairs([worse, better], 200, 0)
    assert (pair.alpha.mean, pair.alpha.low) == (pytest.approx(0.01), pytest.approx(0.01))
    assert pair.tau.mean == pytest.approx(8 / 428)
    sentence = "b against a on the same 8 prompts: α +0.010 [+0.010, +0.010], higher; τ(1) +1.9% ["
    assert sentence in comparison_text([worse, better], [pair])
    (even,) = compare_pairs([worse, judged("c", 0.0)], 200, 0)
    assert even.sentence.endswith("too close to call.")
    assert replace(pair, prompts=5).sentence.endswith("too few prompts to call.")


def test_kinds_are_compared_at_every_drafted_position_and_by_speed(result: EvaluationResult) -> None:
    """The second draft reads states: level at the first position, better at the second, and as dear."""
    alpha = Interval(0.5, 0.5, 0.5)
    plain = PromptSums("d", 100, np.array([50.0, 0, 0, 0]), np.array([60.0, 70.0]), np.array([50.0, 50.0]))
    reading = PromptSums("d", 100, np.array([50.0, 0, 0, 0, 60.0]), np.array([60.0, 90.0]), np.array([50.0, 50.0]))
    first = replace(result, alpha=alpha, kind="pruned", by_prompt=(plain,) * 8)
    second = replace(
        first,
        draft="b",
        kind="eagle",
        alpha_by_position=(alpha, Interval(0.6, 0.6, 0.6)),
        by_prompt=(reading,) * 8,
    )
    (pair,) = compare_pairs([first, second], 20, 0)
    assert [position.mean for position in pair.alpha_by_position] == [0, pytest.approx(0.1)]
    assert pair.speedup is not None
    assert result.speedup is not None
    predicted = result.speedup[1].predicted[1]
    assert pair.speedup.mean == pytest.approx(predicted * (1.8 - 1.4) / result.tau[1].mean)
    text = comparison_text([first, second], [pair])
    assert "α +0.000 [+0.000, +0.000], too close to call; α(2) +0.100 [+0.100, +0.100], higher; τ(2) +28.6%" in text
    assert "predicted speed-up +0." in text
    row = next(line for line in text.splitlines() if "eagle" in line)
    assert "0.50, 0.60" in row
    assert "0.50, 0.50" in next(line for line in text.splitlines() if "pruned" in line)
    assert compare_pairs([first, replace(second, speedup=None)], 20, 0)[0].speedup is None
