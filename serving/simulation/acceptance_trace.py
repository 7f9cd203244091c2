"""Acceptance traces: acceptance of each request's drafted tokens, drawn in advance and equal for every policy."""

from __future__ import annotations

from functools import cached_property

import numpy
from numpy.typing import NDArray

from distillspec.config.simulation import WorkloadConfig

NEVER = 1_000_000  # rank of a token that no candidate list holds


class AcceptanceTrace:
    """Acceptance of one request's drafted tokens, by place in the output.

    A chain drafts first candidates, so its token for place p is accepted if `ranks[p] == 1`. Further candidates are an
    assumption: where those before it were wrong, each is right with the same probability, α or `sibling_alpha`.

    Args:
        ranks: `[output]` int ≥ 1, the rank of the target's token in the draft's candidate list.
        confidence: `[output]` in [0, 1], the draft's probability of its first candidate.
    """

    def __init__(self, ranks: NDArray[numpy.int64], confidence: NDArray[numpy.float64]) -> None:
        self.ranks: list[int] = ranks.tolist()
        self.confidence = confidence

    @cached_property
    def runs(self) -> list[int]:
        """Accepted tokens of a chain that starts at each place, 0 behind the end."""
        return _runs(numpy.asarray(self.ranks) == 1)

    def confident_runs(self, threshold: float) -> list[int]:
        """Return the tokens drafted from each place on: up to and with the first of confidence ≤ `threshold`."""
        return [run + 1 for run in _runs(self.confidence > threshold)]


def draw_acceptance_trace(
    config: WorkloadConfig, alpha: float, output_tokens: int, random: numpy.random.Generator
) -> AcceptanceTrace:
    """Draw a trace of expected acceptance rate `alpha`, varied as `WorkloadConfig` says."""
    chances = numpy.full(output_tokens, _beta(alpha, config.request_spread, random))
    if config.burst_tokens:
        chances += config.burst_depth * _stretches(output_tokens, config.burst_tokens, random)
    chances = chances.clip(0.0, 1.0)
    if config.token_spread:
        chances = _betas(chances, config.token_spread, random)
    further = chances if config.sibling_alpha is None else numpy.full(output_tokens, config.sibling_alpha)
    ranks = _ranks(chances, further, random.random(output_tokens))
    return AcceptanceTrace(ranks, chances)


def _ranks(
    chances: NDArray[numpy.float64], further: NDArray[numpy.float64], uniforms: NDArray[numpy.float64]
) -> NDArray[numpy.int64]:
    """Draw ranks: 1 exactly where the uniform is below the chance, else geometric ones from 2 on."""
    with numpy.errstate(divide="ignore", invalid="ignore", over="ignore"):
        rest = (uniforms - chances) / (1 - chances)
        tries = numpy.floor(numpy.log1p(-rest) / numpy.log1p(-further)) + 2
    ranks = numpy.nan_to_num(tries, nan=NEVER, posinf=NEVER).clip(2, NEVER).astype(numpy.int64)
    return numpy.asarray(numpy.where(uniforms < chances, 1, ranks), dtype=numpy.int64)


def _stretches(length: int, mean: float, random: numpy.random.Generator) -> NDArray[numpy.float64]:
    """Return +1 and −1 in alternating stretches of geometric length."""
    changes = random.random(length) < 1 / max(mean, 1.0)
    first = 1.0 if random.random() < 0.5 else -1.0
    return first * numpy.where(numpy.cumsum(changes) % 2 == 0, 1.0, -1.0)


def _beta(mean: float, spread: float, random: numpy.random.Generator) -> float:
    return float(_betas(numpy.array([mean]), spread, random)[0]) if spread else mean


def _betas(means: NDArray[numpy.float64], spread: float, random: numpy.random.Generator) -> NDArray[numpy.float64]:
    """Draw from beta distributions of the given means and standard deviation, as far as the means allow it."""
    inside = means.clip(1e-6, 1 - 1e-6)
    trials = numpy.maximum(inside * (1 - inside) / spread**2 - 1, 0.05)
    return numpy.asarray(random.beta(inside * trials, (1 - inside) * trials), dtype=numpy.float64)


def _runs(accepted: NDArray[numpy.bool_]) -> list[int]:
    """Count consecutive trues from each place on, with a 0 behind the end."""
    places = numpy.arange(len(accepted) + 1)
    ends = numpy.where(numpy.append(~accepted, True), places, len(accepted))
    following = numpy.minimum.accumulate(ends[::-1])[::-1]
    runs: list[int] = (following - places).tolist()
    return runs
