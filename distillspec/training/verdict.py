"""Verdict on a run: a warning if it learned nothing, with the likely reason."""

from __future__ import annotations

from collections.abc import Mapping

from distillspec.config import TrainCommand
from distillspec.losses import LossMix
from distillspec.training.learning_curve import alphas_compare

FAIR_SHARE = 0.3  # of a run, after which it should have learned something
NEAR_ZERO = 0.01  # held-out α below which a draft is useless
GAIN = 0.001  # smallest rise of α that is not rounding
UNLIKE = 0.05  # of training α over held-out α, more than good runs show
BLIND = ("jsd", "rkl", "tvd", "tvdpp")  # their gradient vanishes where the draft misses the target's tokens


def nothing_learned(
    config: TrainCommand, before: float, alpha: float, last: Mapping[str, float], tokens: int
) -> str | None:
    """Return a warning if held-out `alpha` is near 0 or not above the untrained draft's, with the likely reason.

    Args:
        last: the newest `train/…` values.
        tokens: learned from so far.
    """
    if alpha >= NEAR_ZERO and alpha > before + GAIN:
        return None
    reason = _reason(config, alpha, last, tokens)
    return f"WARNING: nothing learned: held-out α {alpha:.5f}, untrained {before:.5f}. Likely reason: {reason}"


def _reason(config: TrainCommand, alpha: float, last: Mapping[str, float], tokens: int) -> str:
    rate = f"train.learning_rate={config.train.learning_rate}"
    names = LossMix.parse(config.loss.terms).names
    if last.get("train/bad_steps", 0) > 0:
        return f"{last['train/bad_steps']:.0f} steps were not finite; lower {rate}"
    if alpha < NEAR_ZERO and all(name in BLIND for name in names):
        return (
            f"the loss {' and '.join(names)} has next to no gradient where the draft misses the target's tokens; "
            "use the default loss, or loss=fkl"
        )
    if alphas_compare(config) and last.get("train/alpha", 0.0) > alpha + UNLIKE:
        return (
            f"α on the training text is {last['train/alpha']:.3f}; that text is unlike the held-out answers, "
            "or its signal has no draws from the tail (data.tail_draws)"
        )
    if alpha < NEAR_ZERO:
        return f"{tokens} tokens are too few, or {rate} does not suit; train longer or try another"
    return f"{rate} is too high for a draft this good, or the data has nothing new; lower it, or give other data"
