"""Predicted speed-up over plain decoding, the length it recommends, and whether speculation breaks even."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distillspec.evaluation.cost import StepCost


@dataclass(frozen=True)
class Speedup:
    """`predicted[γ − 1]` = τ(γ) / (γ c + β(γ)), in multiples of plain decoding."""

    predicted: tuple[float, ...]
    best_gamma: int  # 0: do not speculate
    breaks_even: bool  # β(γ) ≤ τ(γ) − γ c for some γ
    verdict: str  # one plain sentence

    def to_json(self) -> dict[str, Any]:
        return {
            "predicted": list(self.predicted),
            "best_gamma": self.best_gamma,
            "breaks_even": self.breaks_even,
            "verdict": self.verdict,
        }


def predict_speedup(tau: Sequence[float], cost: StepCost) -> Speedup:
    """Weigh the tokens a step yields, `tau[γ − 1]`, against what the step costs.

    Leviathan et al. 2023, Theorem 3.8, with β(γ) in place of 1 for the cost of verification.
    """
    predicted = [tau[k - 1] / (k * cost.c + cost.beta[k]) for k in range(1, len(tau) + 1)]
    best = 1 + max(range(len(predicted)), key=lambda i: predicted[i])
    gain, room = predicted[best - 1], tau[best - 1] - best * cost.c
    breaks_even = any(cost.beta[k] <= tau[k - 1] - k * cost.c for k in range(1, len(tau) + 1))
    figures = (
        f"verification may cost up to {room:.2f} plain steps "
        f"(tau {tau[best - 1]:.2f} - {best} x {cost.c:.2f}) and costs {cost.beta[best]:.2f}"
    )
    tokens = "1 token" if best == 1 else f"{best} tokens"
    if gain > 1:
        advice = f"Draft {tokens} a step: {gain:.2f} times plain decoding is predicted"
    else:
        advice = f"Do not speculate: even the best length, {tokens}, gives {gain:.2f} times plain decoding"
    verdict = f"{advice}; {figures}."
    return Speedup(tuple(predicted), best if gain > 1 else 0, breaks_even, verdict)
