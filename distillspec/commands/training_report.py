"""Progress line and warnings of `distill train`."""

from __future__ import annotations

from distillspec.config import TrainCommand
from distillspec.progress import ProgressLine
from distillspec.training.schedule import Progress, fraction_done
from distillspec.training.verdict import FAIR_SHARE, nothing_learned


class TrainingReport:
    """Shows the trainer's figures beside the progress bar, and warns once of a run that learns nothing.

    `best` is the highest α so far. A resumed run sets it to its checkpoint's.
    """

    def __init__(self, line: ProgressLine, config: TrainCommand, before: float) -> None:
        self.line, self.config, self.before = line, config, before
        self.shown: dict[str, float] = {}
        self.best, self.warned = 0.0, False

    def __call__(self, now: Progress, values: dict[str, float]) -> None:
        self.shown.update(values)
        fraction = fraction_done(now, self.config.train)
        if "eval/alpha" in values:
            self.best = max(self.best, values["eval/alpha"])
            if FAIR_SHARE <= fraction < 1 and not self.warned:
                self._warn(now)
        words = [f"step {now.step}"]
        for key, label in (("train/loss", "loss"), ("train/alpha", "α"), ("eval/alpha", "held-out α")):
            if key in self.shown:
                words.append(f"{label} {self.shown[key]:.3f}")
        if now.seconds > 0:
            words.append(f"{now.tokens_per_s:.0f} tokens/s")
        self.line.update(fraction, f"{', '.join(words)}, {self.line.left(fraction)} left")

    def _warn(self, now: Progress) -> None:
        """Print the warning at most once: the summary repeats it at the end."""
        problem = nothing_learned(self.config, self.before, self.best, self.shown, now.tokens)
        if problem is not None:
            print(f"step {now.step}: {problem}", flush=True)
            self.warned = True
