"""Drafts compared prompt by prompt. A prompt's difficulty cancels, so small differences become significant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distillspec.evaluation.acceptance import EvaluationResult, PromptSums
from distillspec.evaluation.bootstrap import paired_difference, relative_gain
from distillspec.evaluation.speedup import FEWEST
from distillspec.types import Interval

SHOWN_GAMMA = 4
SHOWN_POSITIONS = 3  # whose α a sentence has room for


@dataclass(frozen=True)
class Pair:
    """Comparison of one draft with another on the same prompts."""

    draft: str
    against: str
    prompts: int
    gamma: int
    alpha: Interval  # α less the other's
    tau: Interval  # how much larger τ(γ) is, as a share of the other's
    alpha_by_position: tuple[Interval, ...] = ()  # α of the first, second, … drafted token less the other's
    speedup: Interval | None = None  # predicted at batch 1 by timed costs, each at its best length, less the other's

    @property
    def sentence(self) -> str:
        """Return the comparison as one plain sentence."""
        parts = [f"α {_signed(self.alpha, '+.3f')}, {_which(self.alpha, self.prompts)}"]
        if any(deeper != self.alpha for deeper in self.alpha_by_position):
            shown = enumerate(self.alpha_by_position[1:SHOWN_POSITIONS], start=2)
            parts += [f"α({i}) {_signed(deeper, '+.3f')}, {_which(deeper, self.prompts)}" for i, deeper in shown]
        parts.append(f"τ({self.gamma}) {_signed(self.tau, '+.1%')}, {_which(self.tau, self.prompts)}")
        if self.speedup is not None:
            parts.append(f"predicted speed-up {_signed(self.speedup, '+.2f')}, {_which(self.speedup, self.prompts)}")
        return f"{self.draft} against {self.against} on the same {self.prompts} prompts: {'; '.join(parts)}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_pairs(results: Sequence[EvaluationResult], samples: int, seed: int) -> list[Pair]:
    """Compare every draft with the first one. All were evaluated on the same text, in the same order."""
    return [_pair(results[0], result, samples, seed) for result in results[1:]]


def _pair(before: EvaluationResult, after: EvaluationResult, samples: int, seed: int) -> Pair:
    longest = min(len(before.tau), len(after.tau))
    gamma = min(SHOWN_GAMMA, longest)
    first, second = before.by_prompt, after.by_prompt
    alphas = tuple(
        paired_difference(_alpha(first, position), _alpha(second, position), samples, seed)
        for position in range(1, longest + 1)
    )
    return Pair(
        after.draft,
        before.draft,
        len(first),
        gamma,
        alphas[0],
        relative_gain(_tau(first, gamma), _tau(second, gamma), samples, seed),
        alphas,
        _speedup(before, after, samples, seed),
    )


def _speedup(before: EvaluationResult, after: EvaluationResult, samples: int, seed: int) -> Interval | None:
    """Return how much higher the best predicted speed-up is at batch 1, None where costs were not timed."""
    if (first := _best_prediction(before)) is None or (second := _best_prediction(after)) is None:
        return None
    return paired_difference(first, second, samples, seed)


Ratio = tuple[list[float], list[float]]  # numerators and denominators by prompt


def _alpha(prompts: Sequence[PromptSums], position: int) -> Ratio:
    """Return the sums by prompt of the `position`-th drafted token's α."""
    return [p.alpha_sum(position) for p in prompts], [float(p.positions) for p in prompts]


def _tau(prompts: Sequence[PromptSums], gamma: int) -> Ratio:
    """Return the sums by prompt of τ(γ)."""
    return [float(p.tokens[gamma - 1]) for p in prompts], [float(p.blocks[gamma - 1]) for p in prompts]


def _best_prediction(result: EvaluationResult) -> Ratio | None:
    """Return the sums by prompt of τ(γ) / (γ c + β(γ)) at the length where it is highest."""
    if (speedup := (result.speedup or {}).get(1)) is None:
        return None
    predicted = speedup.predicted[: len(result.tau)]
    gamma = 1 + max(range(len(predicted)), key=lambda i: predicted[i])
    tokens, blocks = _tau(result.by_prompt, gamma)
    step = result.tau[gamma - 1].mean / predicted[gamma - 1]  # a step's cost in plain steps
    return tokens, [count * step for count in blocks]


def _signed(interval: Interval, form: str) -> str:
    mean, low, high = (format(value, form) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def _which(difference: Interval, prompts: int) -> str:
    if prompts < FEWEST:
        return "too few prompts to call"
    return "higher" if difference.low > 0 else "lower" if difference.high < 0 else "too close to call"
