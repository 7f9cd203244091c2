"""What a draft step and a verification cost on this machine, in runs of the target on one token."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from distillspec.evaluation.cached import CachedModel
from distillspec.models.language_model import LanguageModel

CONTEXT_TOKENS = 256
WARMUP_ROUNDS = 2


@dataclass(frozen=True)
class StepCost:
    """Median seconds of one step at one batch size, a context of `CONTEXT_TOKENS` tokens a row."""

    batch: int
    draft_step_s: float  # one token a row, its (truncated) head included
    verify_s: tuple[float, ...]  # entry k: the target on k + 1 tokens a row, all their logits included

    @property
    def target_step_s(self) -> float:
        return self.verify_s[0]

    @property
    def c(self) -> float:
        """Draft step / target step."""
        return self.draft_step_s / self.target_step_s

    @property
    def beta(self) -> tuple[float, ...]:
        """β(k), k = 0 … γ: verifying k proposals / a plain step; β(0) = 1."""
        return tuple(seconds / self.target_step_s for seconds in self.verify_s)

    def to_json(self) -> dict[str, Any]:
        return {
            "c": self.c,
            "beta": list(self.beta),
            "target_step_s": self.target_step_s,
            "draft_step_s": self.draft_step_s,
        }


def measure_costs(
    draft: LanguageModel,
    target: LanguageModel,
    batches: Sequence[int],
    max_gamma: int,
    *,
    context_tokens: int = CONTEXT_TOKENS,
    rounds: int = 8,
) -> dict[int, StepCost]:
    """Time both models at every batch size. The tokens are random: what they say does not change the time."""
    return {batch: _measure_batch(draft, target, batch, max_gamma, context_tokens, rounds) for batch in batches}


def _measure_batch(
    draft: LanguageModel, target: LanguageModel, batch: int, max_gamma: int, context_tokens: int, rounds: int
) -> StepCost:
    shape = (batch, context_tokens + max_gamma + 1)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(target.identity.vocab_size, shape, generator=generator).to(target.device)
    reader, drafter = CachedModel(target), CachedModel(draft)
    for cached in (reader, drafter):
        cached.extend(ids[:, :context_tokens])
    ids = ids[:, context_tokens:]
    draft_s: list[float] = []
    verify_s: dict[int, list[float]] = defaultdict(list)
    # Draft and target take turns, through the lengths up and down, so that a machine that slows down slows
    # all of them alike.
    for round_ in range(WARMUP_ROUNDS + rounds):
        for k in range(max_gamma + 1) if round_ % 2 else reversed(range(max_gamma + 1)):
            verify, step = _time_step(reader, ids[:, : k + 1]), _time_step(drafter, ids[:, :1])
            if round_ >= WARMUP_ROUNDS:
                verify_s[k].append(verify)
                draft_s.append(step)
    return StepCost(batch, median(draft_s), tuple(median(verify_s[k]) for k in range(max_gamma + 1)))


def _time_step(cached: CachedModel, ids: Tensor) -> float:
    """Seconds to read `ids [B, n]` and pick the most probable token after each; the cache is as before."""
    before = cached.length
    seconds = timed(lambda: cached.extend(ids, last=ids.shape[1]).argmax(-1), ids.device)[0]
    cached.crop(before)
    return seconds


def timed(work: Callable[[], Any], device: torch.device) -> tuple[float, Any]:
    """Seconds that `work()` took, waiting for the accelerator, and what it returned."""
    _synchronise(device)
    start = time.perf_counter()
    result = work()
    _synchronise(device)
    return time.perf_counter() - start, result


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
