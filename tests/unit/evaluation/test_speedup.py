"""Cost, predicted and measured speed-up, with the clock replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.evaluation import StepCost, cost, measure_costs, measure_speedup, measured, predict_speedup
from distillspec.evaluation.cached import CachedModel
from distillspec.evaluation.reference import ReferenceOutput
from distillspec.evaluation.speedup import call
from distillspec.models import LanguageModel
from distillspec.types import Interval, SamplingPolicy


def test_the_formula_and_the_recommended_length() -> None:
    result = predict_speedup([1.6, 2.0, 2.1], StepCost(1, 0.2, (1.0, 1.1, 1.2, 1.8)))
    assert result.predicted == pytest.approx((1.6 / 1.3, 2.0 / 1.6, 2.1 / 2.4))
    assert result.best_gamma == 2
    assert result.breaks_even
    assert result.verdict == (
        "Draft 2 tokens a step: 1.25 times plain decoding [1.25, 1.25] is predicted; "
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


def noisy_cost(c: float, beta: float, noise: float, rounds: int = 8) -> StepCost:
    """γ = 1, rounds scattered evenly around the truth."""
    scatter = 1 + noise * np.linspace(-1, 1, rounds)
    turned = np.roll(scatter, rounds // 2)
    return StepCost(1, c, (1.0, beta), tuple(zip((c * turned).tolist(), (beta * scatter).tolist(), strict=True)))


def taus(mean: float, width: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    return mean + width * np.random.default_rng(0).standard_normal((1000, 1))


def test_a_verification_below_a_plain_step_is_no_merit_of_the_draft() -> None:
    """Measured on a server with AVX512-BF16: verification at 0.77 plain steps, c 0.14."""
    cost = noisy_cost(0.14, 0.77, 0.02)
    assert cost.beta[1] == 1
    assert cost.measured[1].high < 0.8
    useless = predict_speedup([1.0], cost, taus(1.0, 0.0))
    assert useless.call == "slower"
    assert useless.intervals[0].high < 1
    assert (useless.best_gamma, useless.breaks_even) == (0, False)
    weak = predict_speedup([1.18], cost, taus(1.18, 0.02))
    assert weak.call == "too close to call"
    assert weak.best_gamma == 0
    assert weak.verdict.startswith("Too close to call: the best length, 1 token, gives 1.00 times")
    assert "slow on single tokens: verification was measured at 0.77 plain steps [0.7" in weak.verdict
    assert predict_speedup([1.6], cost, taus(1.6, 0.02)).call == "faster"


def test_noise_of_the_costs_widens_the_interval_and_can_hold_one() -> None:
    quiet = predict_speedup([1.3], noisy_cost(0.1, 1.1, 0.005))
    loud = predict_speedup([1.3], noisy_cost(0.1, 1.1, 0.25))
    assert quiet.predicted == pytest.approx(loud.predicted, rel=0.01)
    assert quiet.call == "faster"
    assert loud.call == "too close to call"
    assert loud.intervals[0].low < 1 < loud.intervals[0].high


def test_noise_of_the_text_widens_the_interval_too() -> None:
    cost = noisy_cost(0.1, 1.1, 0.005)
    assert predict_speedup([1.25], cost, taus(1.25, 0.01)).call == "faster"
    assert predict_speedup([1.25], cost, taus(1.25, 0.1)).call == "too close to call"


def test_nothing_is_called_of_a_handful_of_prompts() -> None:
    cost = noisy_cost(0.1, 1.1, 0.005)
    assert predict_speedup([1.6], cost, taus(1.6, 0.0), prompts=6).call == "faster"
    few = predict_speedup([1.6], cost, taus(1.6, 0.0), prompts=5)  # resamples of few prompts hardly differ
    assert (few.call, few.best_gamma, few.breaks_even) == ("too close to call", 0, False)
    assert few.verdict.startswith("Too few prompts to call (5): the best length, 1 token, gives 1.33 times")
    assert call(Interval(1.3, 1.1, 1.4), 3) == "too close to call"


def test_noise_below_one_is_raised_to_one() -> None:
    cost = noisy_cost(0.1, 0.99, 0.05)
    assert cost.plain_share == 1
    assert cost.beta[1] == 1
    assert cost.resampled(200, 0)[:, 1].min() == 1
    assert predict_speedup([1.0], cost).intervals[0].high < 1


def random_cost(seed: int, gammas: int, beta: float, c: float, sigma: float = 0.05) -> StepCost:
    """Rounds of noise around c and one β for all lengths."""
    noise = np.exp(sigma * np.random.default_rng(seed).standard_normal((cost.ROUNDS, gammas + 1)))
    rounds = noise * np.array([c, *[beta] * gammas])
    return StepCost(1, c, (1.0, *[beta] * gammas), tuple(map(tuple, rounds.tolist())))


@pytest.mark.parametrize("gammas", [1, 8, 32])
def test_noise_alone_does_not_make_a_plain_step_slow(gammas: int) -> None:
    shares = [random_cost(seed, gammas, beta=1.0, c=0.1).plain_share for seed in range(200)]
    assert shares.count(1.0) >= 0.95 * len(shares)


@pytest.mark.parametrize("gammas", [8, 32])
def test_a_slow_plain_step_is_found_among_many_lengths(gammas: int) -> None:
    found = [random_cost(seed, gammas, beta=0.77, c=0.1).plain_share for seed in range(20)]
    assert min(found) > 0.6
    assert max(found) < 0.8


def test_noise_alone_does_not_make_a_losing_draft_break_even() -> None:
    """Every length loses 1 %, and has its chance to look better."""
    tau = [0.99 * (0.01 * gamma + 1.3) for gamma in range(1, 9)]
    costs = [random_cost(seed, 8, beta=1.3, c=0.01, sigma=0.1) for seed in range(100)]
    called = [predict_speedup(tau, cost).breaks_even for cost in costs]
    assert sum(called) <= 5


def test_the_recommended_length_comes_with_those_that_may_be_better() -> None:
    rounds = tuple((0.05, 1.0 + 0.01 * i, 1.3 + 0.05 * i * (-1) ** i, 2.5) for i in range(8))
    result = predict_speedup([1.5, 1.8, 1.9], StepCost(1, 0.05, (1.0, 1.0, 1.3, 2.5), rounds))
    assert result.best_gamma_range == (1, 2)
    assert "(the best is between 1 and 2)" in result.verdict


def test_every_draft_step_and_verification_is_timed_beside_a_plain_step(
    draft: LanguageModel, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is at times twice as slow, for longer than a pair and shorter than a round."""
    calls: list[tuple[bool, int]] = []

    def at_times_slow(cached: CachedModel, ids: Tensor) -> float:
        calls.append((cached.model is target, ids.shape[1]))
        slow = 2.0 if (len(calls) - 1) // 6 % 2 else 1.0
        return slow * (10.0 + ids.shape[1] - 1 if cached.model is target else 2.0)

    monkeypatch.setattr(cost, "time_step", at_times_slow)
    result = measure_costs(draft, target, [1], 3, context_tokens=4, rounds=6)[1]
    for triple in range(0, len(calls), 3):
        assert calls[triple + 1] == (True, 1)
        assert {calls[triple][0], calls[triple + 2][0]} == {True, False}
    assert (result.c, result.beta) == (pytest.approx(0.2), pytest.approx((1.0, 1.1, 1.2, 1.3)))
    assert all(interval.high - interval.low < 1e-9 for interval in result.measured)


def test_drift_of_the_machine_cancels(
    draft: LanguageModel, target: LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every step is slower than the one before, fourfold by the end: the ratios must not show it."""
    calls: list[LanguageModel] = []

    def slower_and_slower(cached: CachedModel, ids: Tensor) -> float:
        calls.append(cached.model)
        work = 10.0 + ids.shape[1] - 1 if cached.model is target else 2.0
        return work * (1 + 3 * len(calls) / 60)

    monkeypatch.setattr(cost, "time_step", slower_and_slower)
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
    cost.time_step(cached, torch.tensor([[4, 5]]))
    assert cached.length == 3


def test_measured_speeds_are_paired_and_alternate(
    target: LanguageModel, prompts: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that charges 1 s a plain step and 2 s a step of γ = 3, a perfect draft runs at 4 / 2."""
    order: list[int] = []

    def charged(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
        out: ReferenceOutput = work()
        order.append(out.speculation_length)
        return out.steps * (2.0 if out.speculation_length else 1.0), out

    monkeypatch.setattr(measured, "timed", charged)
    seen: list[tuple[int, int]] = []
    result = measure_speedup(
        target, target, [[ids] for ids in prompts[:4]], SamplingPolicy(0.0), 3, 8, on_prompt=lambda *at: seen.append(at)
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
