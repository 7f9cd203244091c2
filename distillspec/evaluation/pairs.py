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


@dataclass(frozen=True)
class Pair:
    """Comparison of one draft with another on the same prompts."""

    draft: str
    against: str
    prompts: int
    gamma: int
    alpha: Interval  # α less the other's
    tau: Interval  # how much larger τ(γ) is, as a share of the other's

    @property
    def sentence(self) -> str:
        """Return the comparison as one plain sentence."""
        alpha = f"α {_signed(self.alpha, '+.3f')}, {_which(self.alpha, self.prompts)}"
        tau = f"τ({self.gamma}) {_signed(self.tau, '+.1%')}, {_which(self.tau, self.prompts)}"
        return f"{self.draft} against {self.against} on the same {self.prompts} prompts: {alpha}; {tau}."

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def compare_pairs(results: Sequence[EvaluationResult], samples: int, seed: int) -> list[Pair]:
    """Compare every draft with the first one. All were evaluated on the same text, in the same order."""
    return [_pair(results[0], result, samples, seed) for result in results[1:]]


def _pair(before: EvaluationResult, after: EvaluationResult, samples: int, seed: int) -> Pair:
    gamma = min(SHOWN_GAMMA, len(before.tau), len(after.tau))
    first, second = _sums(before.by_prompt, gamma), _sums(after.by_prompt, gamma)
    return Pair(
        after.draft,
        before.draft,
        len(before.by_prompt),
        gamma,
        paired_difference(first[0], second[0], samples, seed),
        relative_gain(first[1], second[1], samples, seed),
    )


Ratio = tuple[list[float], list[float]]  # numerators and denominators by prompt


def _sums(prompts: Sequence[PromptSums], gamma: int) -> tuple[Ratio, Ratio]:
    """Return the sums by prompt of α, and those of τ(γ)."""
    alpha = [float(p.values[0]) for p in prompts], [float(p.positions) for p in prompts]
    tau = [float(p.tokens[gamma - 1]) for p in prompts], [float(p.blocks[gamma - 1]) for p in prompts]
    return alpha, tau


def _signed(interval: Interval, form: str) -> str:
    mean, low, high = (format(value, form) for value in (interval.mean, interval.low, interval.high))
    return f"{mean} [{low}, {high}]"


def _which(difference: Interval, prompts: int) -> str:
    if prompts < FEWEST:
        return "too few prompts to call"
    return "higher" if difference.low > 0 else "lower" if difference.high < 0 else "too close to call"
