"""Cost of a draft step and of a verification on this machine, in runs of the target on one token.

They are the engine's costs where there is an engine (`distill` commands), else those of transformers' passes. Both are
measured in pairs: each is timed right beside a plain step and divided by it, so that a machine that slows down slows
both. Medians over rounds count. Their intervals come from resampling rounds, and cover this run alone.

Verification cannot cost less than a plain step, which could read the same tokens and ignore all but one. If it clearly
measures less (some CPUs are slow on one row), the plain step is slow, and a draft deserves no credit for that: costs
are then given in shorter plain steps. A ratio that is below 1 by noise alone is raised to 1.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from distillspec.evaluation.bootstrap import intervals_of
from distillspec.evaluation.cached import CachedModel
from distillspec.models.language_model import LanguageModel
from distillspec.types import Interval

CONTEXT_TOKENS = 256
WARMUP_ROUNDS = 2
ROUNDS = 10  # the fewest that make a false `plain_share` rarer than 5 % at 32 lengths
RESAMPLES = 1000  # of the rounds, for the costs' own intervals
DRAFT, PLAIN, VERIFY, LOOP = "draft", "plain", "verify", "loop"  # what is timed


@dataclass(frozen=True)
class StepCost:
    """Costs of steps at one batch size, with a context of `CONTEXT_TOKENS` tokens a row. Medians over rounds."""

    batch: int
    draft_step_s: float  # one token a row, its (truncated) head included
    verify_s: tuple[float, ...]  # entry k: the target on k + 1 tokens a row, all their logits included
    # Each round's draft step and verifications of 1 … γ tokens, relative to its plain steps. (): costs are exact.
    rounds: tuple[tuple[float, ...], ...] = ()
    # Cost of drafting 1, 2, … γ tokens, in draft steps. (): one step a token.
    draft_steps: tuple[float, ...] = ()

    @property
    def target_step_s(self) -> float:
        return self.verify_s[0]

    @property
    def c(self) -> float:
        """Return draft step / plain step."""
        return float(self._in_plain_steps(self._medians)[0])

    @property
    def beta(self) -> tuple[float, ...]:
        """Return β(k), k = 0 … γ: verifying k proposals / a plain step, at least 1. β(0) = 1."""
        return (1.0, *self._in_plain_steps(self._medians)[1:].tolist())

    def steps(self, gamma: int) -> float:
        """Return the cost of drafting `gamma` tokens, in draft steps."""
        return self.draft_steps[gamma - 1] if self.draft_steps else float(gamma)

    @cached_property
    def measured(self) -> tuple[Interval, ...]:
        """Return the ratios as measured, possible or not: c, then β(1), β(2), …"""
        return tuple(intervals_of(self._medians, self._resampled_medians(RESAMPLES, 0)))

    @cached_property
    def plain_share(self) -> float:
        """Return the time of a plain step at its best, as a share of the measured one.

        It is below 1 if a verification is surely faster than a plain step, which means in every round. Chance puts all
        of n rounds below 1 once in 2ⁿ cases. The lowest of many intervals is below 1 far more often.
        """
        surely = np.all(self._ratios[:, 1:] < 1, axis=0).tolist()
        return min([1.0, *(i.high for i, faster in zip(self.measured[1:], surely, strict=True) if faster)])

    def resampled(self, samples: int, seed: int) -> NDArray[np.float64]:
        """Return c, β(1), …, β(γ) in every resample of the rounds, `[S, 1 + γ]`."""
        return self._in_plain_steps(self._resampled_medians(samples, seed))

    def to_json(self) -> dict[str, Any]:
        return {
            "c": self.c,
            "beta": list(self.beta),
            "target_step_s": self.target_step_s,
            "draft_step_s": self.draft_step_s,
            "draft_steps": [self.steps(gamma) for gamma in range(1, len(self.beta))],
            "plain_share": self.plain_share,
            "measured": [asdict(interval) for interval in self.measured],
        }

    @property
    def _ratios(self) -> NDArray[np.float64]:
        """Return `[rounds, 1 + γ]`: c and β of every round."""
        steps = (self.draft_step_s, *self.verify_s[1:])
        return np.array(self.rounds or [[seconds / self.target_step_s for seconds in steps]])

    @property
    def _medians(self) -> NDArray[np.float64]:
        medians: NDArray[np.float64] = np.median(self._ratios, axis=0)
        return medians

    def _resampled_medians(self, samples: int, seed: int) -> NDArray[np.float64]:
        count = len(self._ratios)
        drawn = np.random.default_rng(seed).integers(count, size=(samples, count))
        medians: NDArray[np.float64] = np.median(self._ratios[drawn], axis=1)
        return medians

    def _in_plain_steps(self, ratios: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return `ratios [..., 1 + γ]` divided by `plain_share`, verifications at least 1."""
        ratios = ratios / self.plain_share
        return np.concatenate([ratios[..., :1], np.maximum(ratios[..., 1:], 1)], axis=-1)


def measure_costs(
    draft: LanguageModel,
    target: LanguageModel,
    batches: Sequence[int],
    speculation_length: int,
    *,
    context_tokens: int = CONTEXT_TOKENS,
    rounds: int = ROUNDS,
) -> dict[int, StepCost]:
    """Time both models at every batch size. Tokens are random, since their values do not change the time."""
    return {
        batch: _measure_batch(draft, target, batch, speculation_length, context_tokens, rounds) for batch in batches
    }


def _measure_batch(
    draft: LanguageModel, target: LanguageModel, batch: int, speculation_length: int, context_tokens: int, rounds: int
) -> StepCost:
    shape = (batch, context_tokens + speculation_length + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.identity.vocab_size, shape, generator=generator).to(target.device)
    reader, drafter = CachedModel(target), CachedModel(draft)
    for cached in (reader, drafter):
        cached.extend(ids[:, :context_tokens])
    ids = ids[:, context_tokens:]
    positions = min(speculation_length, draft.most_positions or speculation_length)
    block = torch.cat([ids[:, :1], -torch.arange(1, positions, device=ids.device).expand(len(ids), -1)], 1)

    def seconds(side: str, k: int) -> float:
        read = {VERIFY: ids[:, : k + 1], LOOP: block[:, :k]}.get(side, ids[:, :1])
        return time_step(drafter if side in (DRAFT, LOOP) else reader, read)

    return paired_cost(batch, seconds, speculation_length, rounds, loops=draft.drafts_block)


def paired_cost(
    batch: int, seconds: Callable[[str, int], float], speculation_length: int, rounds: int = ROUNDS, *, loops: bool
) -> StepCost:
    """Time the sides in turn. Each verification and draft step has a plain step beside it.

    Lengths go up and down in turn, so that a machine that slows down slows all of them alike.

    Args:
        seconds: times one of the sides: `DRAFT` a draft step, `PLAIN` a plain step, `VERIFY` a verification of k
            drafted tokens, `LOOP` drafting them.
        loops: time `LOOP` too. Else k tokens cost k draft steps.
    """
    sides = (DRAFT, PLAIN, VERIFY, LOOP) if loops else (DRAFT, PLAIN, VERIFY)
    seconds_of: dict[str, list[list[float]]] = defaultdict(lambda: [[] for _ in range(speculation_length)])
    for round_ in range(WARMUP_ROUNDS + rounds):
        turn = 1 if round_ % 2 else -1
        for k in range(1, speculation_length + 1)[::turn]:
            for side in sides[::turn]:
                took = seconds(side, k)
                if round_ >= WARMUP_ROUNDS:
                    seconds_of[side][k - 1].append(took)
    times = {side: np.array(values) for side, values in seconds_of.items()}  # [γ, rounds] each
    c, beta = np.median(times[DRAFT] / times[PLAIN], axis=0), times[VERIFY] / times[PLAIN]
    steps = np.maximum.accumulate(np.median(times[LOOP], axis=1) / np.median(times[DRAFT])) if loops else np.array([])
    return StepCost(
        batch,
        median(times[DRAFT].flat),
        (median(times[PLAIN].flat), *np.median(times[VERIFY], axis=1).tolist()),
        tuple(map(tuple, np.column_stack([c, beta.T]).tolist())),
        tuple(steps.tolist()),
    )


MeasureCosts = Callable[[LanguageModel, LanguageModel, Sequence[int], int], dict[int, StepCost]]
COSTS: dict[str, MeasureCosts] = {"reference": measure_costs}  # `distillspec.cli` adds the engine


def time_step(cached: CachedModel, ids: Tensor) -> float:
    """Return the seconds to read `ids [B, n]` and pick the most probable token after each. Restores the cache."""
    before = cached.length
    seconds = timed(lambda: cached.extend(ids, last=ids.shape[1]).argmax(-1), ids.device)[0]
    cached.crop(before)
    return seconds


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Return the seconds that `work()` took, the accelerator's work included, and its result."""
    _synchronise(device)
    start = time.perf_counter()
    result = work()
    _synchronise(device)
    return time.perf_counter() - start, result


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
