"""Predicted speed-up over plain decoding, the length it recommends, and the verdict on speculation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from distillspec.evaluation.bootstrap import QUANTILES, intervals_of
from distillspec.evaluation.cost import StepCost
from distillspec.types import Interval

Call = Literal["faster", "slower", "too close to call"]
FEWEST = 6  # prompts: with five, all are on one side by chance in 6 % of the cases
WORTH_SAYING = 0.97  # share of the measured plain step below which a note is printed
COST_SEED = 1  # rounds and prompts are resampled independently


def call(ratio: Interval, prompts: int | None = None) -> Call:
    """Return faster or slower if the interval excludes 1. Fewer than `FEWEST` prompts decide nothing."""
    if _too_few(prompts):
        return "too close to call"
    return "faster" if ratio.low > 1 else "slower" if ratio.high < 1 else "too close to call"


def _too_few(prompts: int | None) -> bool:
    return prompts is not None and prompts < FEWEST


@dataclass(frozen=True)
class Speedup:
    """`predicted[γ − 1]` = τ(γ) / (γ c + β(γ)), in multiples of plain decoding.

    A draft of blocks has `StepCost.steps(γ)` in place of γ.
    """

    predicted: tuple[float, ...]
    intervals: tuple[Interval, ...]  # of the predictions: prompts and timing rounds resampled
    best_gamma: int  # 0: speculation is not surely faster
    best_gamma_range: tuple[int, int]  # the lengths that are best in 95 % of the resamples
    call: Call  # of the best length
    breaks_even: bool  # β(γ) ≤ τ(γ) − γ c for some γ, surely, whatever γ was picked
    verdict: str  # one plain sentence

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "predicted": list(self.predicted),
            "intervals": [asdict(interval) for interval in self.intervals],
            "best_gamma_range": list(self.best_gamma_range),
        }


def predict_speedup(
    tau: Sequence[float],
    cost: StepCost,
    tau_samples: NDArray[np.float64] | None = None,
    seed: int = 0,
    prompts: int | None = None,
) -> Speedup:
    """Weigh the tokens a step yields, `tau[γ − 1]`, against the step's cost.

    Leviathan et al. 2023, Theorem 3.8, with β(γ) in place of 1 for the cost of verification.

    Args:
        tau_samples: τ in every resample of the prompts, `[S, G]`. None: τ is known exactly.
        prompts: the number of these prompts. With too few, nothing is claimed.
    """
    known = np.asarray(tau, dtype=np.float64)
    samples = known[None] if tau_samples is None else tau_samples
    steps = np.array([cost.steps(gamma) for gamma in range(1, known.size + 1)])
    predicted = _ratios(known, steps, np.array([cost.c, *cost.beta[1:]]))
    costs = cost.resampled(len(samples) if tau_samples is not None else 1000, seed + COST_SEED)
    resampled = _ratios(samples, steps, costs)
    intervals = intervals_of(predicted, resampled)
    best = 1 + int(predicted.argmax())
    called = call(intervals[best - 1], prompts)
    whole = resampled[~np.isnan(resampled).any(1)]
    low, high = np.quantile(1 + whole.argmax(1), QUANTILES, method="inverted_cdf").tolist()
    likely = min(low, best), max(high, best)
    return Speedup(
        tuple(predicted.tolist()),
        tuple(intervals),
        best if called == "faster" else 0,
        likely,
        called,
        _breaks_even(whole) and not _too_few(prompts),
        _verdict(called, best, likely, intervals[best - 1], known[best - 1], cost, prompts),
    )


def _breaks_even(resampled: NDArray[np.float64]) -> bool:
    """Return True if some length surely breaks even, with Bonferroni's correction for the number of lengths."""
    return bool((np.quantile(resampled, QUANTILES[0] / resampled.shape[-1], axis=0) >= 1).any())


def _ratios(tau: NDArray[np.float64], steps: NDArray[np.float64], costs: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return speed-ups `[..., G]` from `tau [..., G]`, draft `steps [G]` and `costs [..., 1 + γ]` (c, β(1), …)."""
    ratios: NDArray[np.float64] = tau / (steps * costs[..., :1] + costs[..., 1 : tau.shape[-1] + 1])
    return ratios


def _verdict(
    called: Call, best: int, likely: tuple[int, int], gain: Interval, tau: float, cost: StepCost, prompts: int | None
) -> str:
    tokens = "1 token" if best == 1 else f"{best} tokens"
    between = "" if likely[0] == likely[1] else f" (the best is between {likely[0]} and {likely[1]})"
    shown = f"{gain.mean:.2f} times plain decoding [{gain.low:.2f}, {gain.high:.2f}]"
    unsure = f"Too few prompts to call ({prompts})" if _too_few(prompts) else "Too close to call"
    advice = {
        "faster": f"Draft {tokens} a step{between}: {shown} is predicted",
        "slower": f"Do not speculate: even the best length, {tokens}, gives {shown}",
        "too close to call": f"{unsure}: the best length, {tokens}{between}, gives {shown}",
    }[called]
    room = tau - cost.steps(best) * cost.c
    figures = (
        f"verification may cost up to {room:.2f} plain steps "
        f"(tau {tau:.2f} - {cost.steps(best):.3g} x {cost.c:.2f}) and costs {cost.beta[best]:.2f}"
    )
    return f"{advice}; {figures}.{_about_plain_steps(cost)}"


def _about_plain_steps(cost: StepCost) -> str:
    """Return a note if the machine is slow on single tokens. That speed-up is no merit of the draft."""
    if cost.plain_share > WORTH_SAYING:
        return ""
    fastest = next(interval for interval in cost.measured[1:] if interval.high == cost.plain_share)
    return (
        f" This machine is slow on single tokens: verification was measured at {fastest.mean:.2f} plain steps "
        f"[{fastest.low:.2f}, {fastest.high:.2f}]. That is no merit of the draft, so a plain step counts as "
        f"{cost.plain_share:.2f} of what was measured; speed-ups by the clock have no such correction."
    )
