"""How far a run is, when it ends, and the learning rate there."""

from __future__ import annotations

import math
from dataclasses import dataclass

from distillspec.config import TrainConfig


@dataclass(frozen=True)
class Progress:
    """What a run has used so far."""

    step: int = 0
    tokens: int = 0  # response tokens learned from
    seconds: float = 0.0  # wall time of the training loop, with its sampling, evaluations and saves
    evaluating: float = 0.0  # the part of `seconds` that evaluations and their saves took
    evaluation: float = 0.0  # what one of them is expected to take; 0 while nobody knows
    refresh: float = 0.0  # what taking fresh samples is expected to take; 0 while nobody knows

    @property
    def tokens_per_s(self) -> float:
        """Response tokens a second, evaluations left out."""
        return self.tokens / max(self.seconds - self.evaluating, 1e-9)


def training_seconds(progress: Progress, config: TrainConfig) -> float:
    """When the steps of a run limited by `train.max_minutes` end: the last evaluation still fits behind them.

    An evaluation is given at most half of the run, so that something is learnt.
    """
    assert config.max_minutes is not None
    limit = 60 * config.max_minutes
    return limit - min(progress.evaluation, limit / 2)


def evaluation_fits(progress: Progress, config: TrainConfig) -> bool:
    """Whether another evaluation leaves the last one its place in `train.eval_share` of a run limited by time."""
    if config.max_minutes is None:
        return True
    return progress.evaluating + 2 * progress.evaluation <= config.eval_share * 60 * config.max_minutes


def refresh_fits(progress: Progress, config: TrainConfig) -> bool:
    """Whether fresh samples leave time to learn from them, in a run limited by time."""
    return config.max_minutes is None or progress.seconds + progress.refresh < training_seconds(progress, config)


def fraction_done(progress: Progress, config: TrainConfig) -> float:
    """The largest of the shares of steps, time and tokens used, in [0, 1]."""
    shares = [
        progress.step / config.max_steps if config.max_steps else 0.0,
        progress.seconds / training_seconds(progress, config) if config.max_minutes else 0.0,
        progress.tokens / config.max_tokens if config.max_tokens else 0.0,
    ]
    return min(1.0, max(shares))


def stopped_by(progress: Progress, config: TrainConfig) -> str | None:
    """Which limit the run has met, if any."""
    if config.max_steps is not None and progress.step >= config.max_steps:
        return "steps"
    if config.max_minutes is not None and progress.seconds >= training_seconds(progress, config):
        return "minutes"
    if config.max_tokens is not None and progress.tokens >= config.max_tokens:
        return "tokens"
    return None


def learning_rate_factor(fraction: float, config: TrainConfig) -> float:
    """The multiple of the peak learning rate at `fraction` of the run, in (0, 1].

    Linear warm-up; then `cosine` to a hundredth, `wsd` flat until the last `decay_fraction` and from there
    by 1 − √ (Hägele et al. 2024) to a hundredth, or `constant`.
    """
    if fraction < config.warmup_fraction:
        return max(fraction / config.warmup_fraction, 0.01)
    if config.schedule == "cosine":
        share = (fraction - config.warmup_fraction) / max(1 - config.warmup_fraction, 1e-9)
        return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share))
    if config.schedule == "wsd" and config.decay_fraction > 0:
        share = (fraction - (1 - config.decay_fraction)) / config.decay_fraction
        return 0.01 + 0.99 * (1 - math.sqrt(min(max(share, 0.0), 1.0)))
    return 1.0
