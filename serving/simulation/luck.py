"""Which drafted tokens stand, drawn before anything is simulated: by request and place, the same for every policy."""

from __future__ import annotations

from functools import cached_property

import numpy
from numpy.typing import NDArray

from distillspec.config.simulation import WorkloadConfig

NEVER = 1_000_000  # the rank of a token that no candidate list holds


class Luck:
    """One request's luck.

    Args:
        ranks: `[output]` int, at which place of the draft's list (1 … ) the token stands that the target wants there.
        confidence: `[output]` in [0, 1], the draft's probability of its first candidate.

    A chain drafts first candidates: the token for place p stands where `ranks[p] == 1`. What candidate lists are worth
    is an assumption: the r-th candidate is right with α (1 − α)^(r − 1), as if each were another independent try.
    """

    def __init__(self, ranks: NDArray[numpy.int64], confidence: NDArray[numpy.float64]) -> None:
        self.ranks: list[int] = ranks.tolist()
        self.confidence = confidence

    @cached_property
    def runs(self) -> list[int]:
        """How many drafted tokens stand in a row from each place on; 0 behind the end."""
        return _runs(numpy.asarray(self.ranks) == 1)

    def confident_runs(self, threshold: float) -> list[int]:
        """How many tokens are drafted from each place on before the draft's confidence fails, that one included."""
        return [run + 1 for run in _runs(self.confidence > threshold)]


def draw_luck(config: WorkloadConfig, alpha: float, output_tokens: int, random: numpy.random.Generator) -> Luck:
    """A request's luck for an expected acceptance rate `alpha`; see `WorkloadConfig` for what varies it."""
    chances = numpy.full(output_tokens, _beta(alpha, config.request_spread, random))
    if config.burst_tokens:
        chances += config.burst_depth * _stretches(output_tokens, config.burst_tokens, random)
    chances = chances.clip(0.0, 1.0)
    if config.token_spread:
        chances = _betas(chances, config.token_spread, random)
    ranks = _ranks(chances, random.random(output_tokens))
    return Luck(ranks, chances)


def _ranks(chances: NDArray[numpy.float64], uniforms: NDArray[numpy.float64]) -> NDArray[numpy.int64]:
    """Geometric: P(rank = r) = c (1 − c)^(r − 1); rank 1 exactly where the uniform number is below the chance."""
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        tries = numpy.floor(numpy.log1p(-uniforms) / numpy.log1p(-chances)) + 1
    ranks = numpy.nan_to_num(tries, nan=NEVER, posinf=NEVER).clip(1, NEVER).astype(numpy.int64)
    ranks = numpy.where(uniforms < chances, 1, numpy.maximum(ranks, 2))
    return numpy.asarray(ranks, dtype=numpy.int64)


def _stretches(length: int, mean: float, random: numpy.random.Generator) -> NDArray[numpy.float64]:
    """+1 and −1 by turns, for geometric numbers of places."""
    changes = random.random(length) < 1 / max(mean, 1.0)
    first = 1.0 if random.random() < 0.5 else -1.0
    return first * numpy.where(numpy.cumsum(changes) % 2 == 0, 1.0, -1.0)


def _beta(mean: float, spread: float, random: numpy.random.Generator) -> float:
    return float(_betas(numpy.array([mean]), spread, random)[0]) if spread else mean


def _betas(means: NDArray[numpy.float64], spread: float, random: numpy.random.Generator) -> NDArray[numpy.float64]:
    """Beta draws of the given means and a standard deviation, as far as the means allow it."""
    inside = means.clip(1e-6, 1 - 1e-6)
    trials = numpy.maximum(inside * (1 - inside) / spread**2 - 1, 0.05)
    return numpy.asarray(random.beta(inside * trials, (1 - inside) * trials), dtype=numpy.float64)


def _runs(stands: NDArray[numpy.bool_]) -> list[int]:
    """Trues in a row from each place on, and a 0 behind the end."""
    places = numpy.arange(len(stands) + 1)
    ends = numpy.where(numpy.append(~stands, True), places, len(stands))
    following = numpy.minimum.accumulate(ends[::-1])[::-1]
    runs: list[int] = (following - places).tolist()
    return runs
