"""Progress of a run: its limits, its evaluations and its learning rate."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distillspec.config import TrainConfig


@dataclass(frozen=True)
class Progress:
    """Steps, tokens and time that a run has used so far."""

    step: int = 0
    tokens: int = 0  # response tokens learned from
    seconds: float = 0.0  # wall time of the training loop, with its sampling, evaluations and saves
    evaluating: float = 0.0  # the part of `seconds` that evaluations and their saves took
    evaluation: float = 0.0  # seconds one of them is expected to take, 0 while unknown
    refresh: float = 0.0  # seconds that taking fresh samples is expected to take, 0 while unknown
    began: float = 0.0  # share of the run that was over before the first step: an on-policy run writes text first

    @property
    def tokens_per_s(self) -> float:
        """Return response tokens a second, without the time of evaluations."""
        return self.tokens / max(self.seconds - self.evaluating, 1e-9)


def training_seconds(progress: Progress, config: TrainConfig) -> float:
    """Return the seconds after which the steps of a run limited by `train.max_minutes` end.

    They leave room for the last evaluation, which gets at most half of the run.
    """
    assert config.max_minutes is not None
    limit = 60 * config.max_minutes
    return limit - min(progress.evaluation, limit / 2)


def evaluation_fits(progress: Progress, config: TrainConfig) -> bool:
    """Return True if another evaluation and the last one fit into `train.eval_share` of a run limited by time."""
    if config.max_minutes is None:
        return True
    return progress.evaluating + 2 * progress.evaluation <= config.eval_share * 60 * config.max_minutes


def refresh_fits(progress: Progress, config: TrainConfig) -> bool:
    """Return True if, in a run limited by time, some is left to learn from fresh samples."""
    return config.max_minutes is None or progress.seconds + progress.refresh < training_seconds(progress, config)


def fraction_done(progress: Progress, config: TrainConfig) -> float:
    """Return the largest of the used shares of steps, time and tokens, in [0, 1]."""
    shares = [
        progress.step / config.max_steps if config.max_steps else 0.0,
        progress.seconds / training_seconds(progress, config) if config.max_minutes else 0.0,
        progress.tokens / config.max_tokens if config.max_tokens else 0.0,
    ]
    return min(1.0, max(shares))


def stopped_by(progress: Progress, config: TrainConfig) -> str | None:
    """Return the limit that the run has met ("steps", "minutes" or "tokens"), or None."""
    if config.max_steps is not None and progress.step >= config.max_steps:
        return "steps"
    if config.max_minutes is not None and progress.seconds >= training_seconds(progress, config):
        return "minutes"
    if config.max_tokens is not None and progress.tokens >= config.max_tokens:
        return "tokens"
    return None


class EvaluationSchedule:
    """Steps at which a run is evaluated: every `train.eval_every`, or each tenth of the run that leaves enough time."""

    def __init__(self, config: TrainConfig) -> None:
        self._config = config
        self._next_fraction = 0.0

    def plan(self, progress: Progress) -> None:
        """Set the next evaluation to the next tenth of the run."""
        self._next_fraction = (math.floor(fraction_done(progress, self._config) * 10 + 1e-9) + 1) / 10

    def due(self, progress: Progress) -> bool:
        """Return True if the step just done is to be evaluated. Skips a tenth for which there is no time."""
        if self._config.eval_every is not None:
            return progress.step % self._config.eval_every == 0
        if fraction_done(progress, self._config) < self._next_fraction:
            return False
        if not evaluation_fits(progress, self._config):
            self.plan(progress)
            return False
        return True


def learning_rate_factor(fraction: float, config: TrainConfig, began: float = 0.0) -> float:
    """Return the multiple of the peak learning rate at `fraction` of the run, in (0, 1].

    After a linear warm-up from the first step on, at `began`, `cosine` falls to a hundredth, `constant` stays, and
    `wsd` stays until the last `decay_fraction`, over which it falls by 1 − √ to a hundredth (Hägele et al. 2024). A
    warm-up that ends within that share leaves what is left of the run to the fall.
    """
    begun = began + config.warmup_fraction
    if fraction < begun:
        return max((fraction - began) / config.warmup_fraction, 0.01)
    if config.schedule == "cosine":
        share = (fraction - begun) / max(1 - begun, 1e-9)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share))
    if config.schedule == "wsd" and config.decay_fraction > 0:
        length = max(min(config.decay_fraction, 1 - begun), 1e-9)
        share = (fraction - (1 - length)) / length
        return 0.01 + 0.99 * (1 - math.sqrt(min(max(share, 0.0), 1.0)))
    return 1.0
