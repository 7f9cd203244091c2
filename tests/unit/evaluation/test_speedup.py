"""Cost, predicted and measured speed-up, with the clock replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.evaluation import StepCost, cost, measure_costs, measure_speedup, measured, predict_speedup
from distillspec.evaluation.cached import CachedModel
from distillspec.evaluation.reference import ReferenceOutput
from distillspec.models import LanguageModel
from distillspec.types import SamplingPolicy


def test_the_formula_and_the_recommended_length() -> None:
    result = predict_speedup([1.6, 2.0, 2.1], StepCost(1, 0.2, (1.0, 1.1, 1.2, 1.8)))
    assert result.predicted == pytest.approx((1.6 / 1.3, 2.0 / 1.6, 2.1 / 2.4))
    assert result.best_gamma == 2
    assert result.breaks_even
    assert result.verdict == (
        "Draft 2 tokens a step: 1.25 times plain decoding is predicted; "
        "verification may cost up to 1.60 plain steps (tau 2.00 - 2 x 0.20) and costs 1.20."
    )


def test_a_draft_that_loses_is_not_recommended() -> None:
    result = predict_speedup([1.3, 1.4], StepCost(8, 2.0, (4.0, 5.0, 6.0)))  # c = 0.5, β = 1.25, 1.5
    assert result.best_gamma == 0
    assert not result.breaks_even
    assert result.verdict.startswith("Do not speculate: even the best length, 1 token, gives 0.74 times")


def test_exactly_even_breaks_even_but_gains_nothing() -> None:
    result = predict_speedup([1.5], StepCost(1, 0.25, (1.0, 1.25)))
    assert (result.best_gamma, result.breaks_even) == (0, True)


def test_drift_of_the_machine_cancels(
    draft: LanguageModel, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is slower than the one before, fourfold by the end: the ratios must not show it."""
    calls: list[LanguageModel] = []

    def slower_and_slower(cached: CachedModel, ids: Tensor) -> float:
        calls.append(cached.model)
        work = 10.0 + ids.shape[1] - 1 if cached.model is target else 2.0
        return work * (1 + 3 * len(calls) / 60)

    monkeypatch.setattr(cost, "_time_step", slower_and_slower)
    result = measure_costs(draft, target, [1], 2, context_tokens=4, rounds=8)[1]
    assert len(calls) == 60
    assert result.c == pytest.approx(0.2, rel=0.03)
    assert result.beta == pytest.approx((1.0, 1.1, 1.2), rel=0.03)


def test_real_steps_are_timed_at_every_batch_and_leave_no_trace(
    truncated_draft: LanguageModel, target: LanguageModel
) -> None:
    costs = measure_costs(truncated_draft, target, [1, 3], 2, context_tokens=8, rounds=2)
    assert list(costs) == [1, 3]
    for batch, found in costs.items():
        assert found.batch == batch
        assert min(found.draft_step_s, *found.verify_s) > 0
        assert found.beta[0] == 1
        assert len(found.to_json()["beta"]) == 3
    cached = CachedModel(target)
    cached.extend(torch.tensor([[1, 2, 3]]))
    cost._time_step(cached, torch.tensor([[4, 5]]))
    assert cached.length == 3


def test_measured_speeds_are_paired_and_alternate(
    target: LanguageModel, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that charges 1 s a plain step and 2 s a step of γ = 3, a perfect draft runs at 4 / 2."""
    order: list[int] = []

    def charged(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
        out: ReferenceOutput = work()
        order.append(out.gamma)
        return out.steps * (2.0 if out.gamma else 1.0), out

    monkeypatch.setattr(measured, "timed", charged)
    seen: list[tuple[int, int]] = []
    result = measure_speedup(
        target, target, prompts[:4], SamplingPolicy(0.0), 3, 8, on_prompt=lambda *at: seen.append(at)
    )
    assert order == [3, 0, 3, 3, 0, 0, 3, 3, 0]  # a warm-up, then pairs in alternating order
    assert result.plain_tokens_per_s == pytest.approx(1.0)
    assert result.speculative_tokens_per_s == pytest.approx(2.0)
    assert result.ratio.mean == pytest.approx(2.0)
    assert result.tau == pytest.approx(4.0)
    assert seen[-1] == (4, 4)


def test_nothing_to_measure_is_refused(target: LanguageModel) -> None:
    with pytest.raises(ConfigError, match=r"evaluation\.speedup_prompts"):
        measure_speedup(target, target, [], SamplingPolicy(), 2, 4)
