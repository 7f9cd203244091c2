"""Rounds in which all sides of the live comparison answer the same prompts by turns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distillspec.evaluation.measured import in_turn
from distillspec.progress import progress
from distillspec.recipes.spin.answers import Answers, SeededPrompt, answer
from distillspec.recipes.spin.idle import Idle
from distillspec.recipes.spin.sides import Side
from distillspec.serving import SamplingParams


class Rates:
    """Tokens a second of some sides by round.

    Attributes:
        whole: of all rows together, by side.
        by_domain: of one row, by side and domain.
        idle: sums over steps, by side.
        seconds: that all rounds took.
    """

    def __init__(self, sides: Mapping[str, Side]) -> None:
        self.whole: dict[str, list[float]] = {name: [] for name in sides}
        self.by_domain: dict[str, dict[str, list[float]]] = {name: {} for name in sides}
        self.idle = {name: Idle() for name in sides}
        self.seconds = 0.0

    def add(self, name: str, answers: Answers) -> None:
        """Add a side's round."""
        self.whole[name].append(answers.rate)
        for domain, rate in answers.by_domain.items():
            self.by_domain[name].setdefault(domain, []).append(rate)
        self.seconds += answers.seconds

    def figures(self) -> dict[str, Any]:
        """Return all of this for JSON."""
        idle = {name: sums.shares() for name, sums in self.idle.items()}
        return {"tokens_per_s": self.whole, "by_domain": self.by_domain, "idle": idle, "seconds": self.seconds}


def run_rounds(
    title: str, sides: Mapping[str, Side], rounds: Sequence[Sequence[SeededPrompt]], params: SamplingParams
) -> Rates:
    """Let every side answer the prompts of each round."""
    rates = Rates(sides)
    with progress(title) as line:
        for round_, prompts in enumerate(rounds):
            for index, name in enumerate(in_turn(sides, round_)):
                line.update((round_ + index / len(sides)) / len(rounds), name)
                rates.add(name, answer(name, sides[name], prompts, params, rates.idle[name]))
    return rates
