"""A pool with one more draft against the same pool without it: tokens a second over all that is served. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from distillspec.types import Interval

MOST = 10.0  # the largest gain on a domain that is asked for. Where it is not enough, no gain is
LEAST = -0.99


@dataclass(frozen=True)
class PoolComparison:
    """Compares a pool with a specialist for one domain to the pool without it.

    The domain's text takes a share s of the time. If its tokens a second are 1 + g times as many, the pool's are
    (1 − trials) · (1 − memory) / (1 − s + s / (1 + g)) times as many (Amdahl 1967). That rises with g, so the interval
    of the domain's gain gives that of the pool's.

    Attributes:
        share: s in [0, 1].
        trials: share of all tokens that the selection loses by trying one more draft.
        memory: share of all tokens that are lost where its cache leaves fewer slots (`lost_to_memory`).
        problem: why it does not fit into memory, with its name. None: it fits.
    """

    share: float
    trials: float = 0.0
    memory: float = 0.0
    problem: str | None = None

    def pool_gain(self, gain: float) -> float:
        """Return the pool's relative gain, where the domain's is `gain`."""
        return self._kept / (1 - self.share + self.share / (1 + max(gain, LEAST))) - 1

    def interval(self, gain: Interval) -> Interval:
        """Return the interval of the pool's gain."""
        return Interval(*map(self.pool_gain, (gain.mean, gain.low, gain.high)))

    def least_gain(self, margin: float) -> float:
        """Return the gain on the domain from which on the pool's exceeds `margin` of the domain's share."""
        rest = self._kept / (1 + self.share * margin) - (1 - self.share)
        return MOST if rest <= self.share / (1 + MOST) else self.share / rest - 1

    def describe(self, gain: Interval) -> str:
        """Describe the pool's gain for a verdict's reason."""
        pool = self.interval(gain)
        costs = f"trials {self.trials:.1%}, slots {self.memory:.1%} taken off"
        return f"pool {pool.mean:+.2%} ({pool.low:+.2%} … {pool.high:+.2%}), {costs}"

    @property
    def _kept(self) -> float:
        return (1 - self.trials) * (1 - self.memory)


def lost_to_memory(rows: float, slots: int, seconds: Callable[[int], float] | None = None) -> float:
    """Return the share of the tokens a second that is lost where fewer rows than are served run at a time.

    Args:
        rows: that are served at a time.
        slots: that there are.
        seconds: of a step of so many rows. None: unknown, each row is taken to write as fast beside others as alone.
    """
    served = max(1, round(rows))
    if slots >= served:
        return 0.0
    if slots < 1:
        return 1.0
    rates = [count if seconds is None else count / seconds(count) for count in (slots, served)]
    lost = 1 - rates[0] / rates[1]
    return max(0.0, lost) if math.isfinite(lost) else 0.0
