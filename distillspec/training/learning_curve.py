"""Learning curve of a finished run: an estimate of what more minutes, and more text, could give at most."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy

from distillspec.config import TrainCommand
from distillspec.files import read_lines
from distillspec.types import SamplingPolicy

PLAIN = SamplingPolicy()  # temperature 1, without filters

TAIL = 0.1  # share of the run at its end whose training α counts


def alphas_compare(config: TrainCommand) -> bool:
    """Return True if α of the loss and α of evaluations are of the same distributions, and of all tokens."""
    loss = config.loss
    return config.sampling.policy == PLAIN and loss.temperature == 1.0 and loss.select_fraction is None


@dataclass(frozen=True)
class LearningCurve:
    """Figures of a run that say what held it back.

    Attributes:
        passes: times that the training text was read.
        text_alpha: acceptance rate on the training text at the end.
        held_out: acceptance rate on held-out answers at the end, those that chose the checkpoint.
        rise: of the held-out acceptance rate since half of the tokens.
    """

    passes: float
    text_alpha: float
    held_out: float
    rise: float

    @classmethod
    def of(cls, run: Path, text_tokens: int) -> LearningCurve | None:
        """Read a run's `metrics.jsonl`. None if it was evaluated less than twice, or had no text of its own.

        Args:
            text_tokens: response tokens of the training text.
        """
        rows = read_lines(run / "metrics.jsonl")
        held_out = [(row["tokens"], row["eval/alpha"]) for row in rows if "eval/alpha" in row]
        if not text_tokens or len(held_out) < 2:
            return None
        tokens, last = held_out[-1]
        recent = [row["train/alpha"] for row in rows if "train/alpha" in row and row["tokens"] > (1 - TAIL) * tokens]
        halfway = float(numpy.interp(tokens / 2, [at for at, _ in held_out], [alpha for _, alpha in held_out]))
        if not recent:
            return None
        return cls(tokens / text_tokens, sum(recent) / len(recent), last, last - halfway)

    @property
    def gap(self) -> float:
        """Return how much lower α is on held-out answers than on the training text. More text can close this gap."""
        return max(0.0, self.text_alpha - self.held_out)

    def line(self) -> str:
        """Return two bounds and an advice, for people."""
        text, minutes = f"more text may give up to {self.gap:+.3f}", f"as many minutes again up to {self.rise:+.3f}"
        summary = (
            f"The text was read {self.passes:.1f} times. α is {self.text_alpha:.3f} on it and {self.held_out:.3f} on "
            f"held-out answers: {text}, {minutes}."
        )
        if self.gap > max(self.rise, 0.0):
            return f"{summary} More text comes first (data.max_minutes, data.num_prompts)."
        if self.rise > 0:
            return f"{summary} More minutes come first (train.max_minutes)."
        return f"{summary} Neither seems to help this draft: try another kind, or more layers."

    def to_json(self) -> dict[str, Any]:
        return {**vars(self), "gap": self.gap, "line": self.line()}
