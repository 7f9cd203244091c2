"""Measured speed-up: the reference decoder against plain decoding, prompt by prompt."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from distillspec.errors import ConfigError
from distillspec.evaluation.bootstrap import median_interval
from distillspec.evaluation.cost import timed
from distillspec.evaluation.reference import ReferenceOutput, plain_generate, speculative_generate
from distillspec.models.language_model import LanguageModel
from distillspec.types import Interval, SamplingPolicy


@dataclass(frozen=True)
class MeasuredSpeedup:
    """Speeds at batch 1, reading the prompt included. `ratio` is the median over prompts of paired tokens/s."""

    gamma: int
    plain_tokens_per_s: float
    speculative_tokens_per_s: float
    ratio: Interval  # `mean` holds the median
    tau: float  # tokens a run of the target
    prompts: int | None = None  # how many were decoded both ways

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class _Run:
    seconds: float
    output: ReferenceOutput

    @property
    def tokens_per_s(self) -> float:
        return len(self.output.token_ids) / self.seconds


def measure_speedup(
    draft: LanguageModel,
    target: LanguageModel,
    prompts: Sequence[Sequence[int]],
    policy: SamplingPolicy,
    gamma: int,
    max_new_tokens: int,
    *,
    bootstrap_samples: int = 1000,
    seed: int = 0,
    on_prompt: Callable[[int, int], None] | None = None,
) -> MeasuredSpeedup:
    """Decode every prompt (token ids) both ways, one right after the other, in alternating order.

    Sampled responses differ in length, so speeds are compared, not times. `on_prompt` is called with `(done, total)`.

    Raises:
        ConfigError: there is no prompt.
    """
    if not prompts:
        raise ConfigError("the measured speed-up needs at least one prompt; raise evaluation.speedup_prompts")

    def plain(ids: Sequence[int]) -> _Run:
        work = lambda: plain_generate(target, ids, policy, max_new_tokens, seed=seed)  # noqa: E731
        return _Run(*timed(work, target.device))

    def speculative(ids: Sequence[int]) -> _Run:
        work = lambda: speculative_generate(draft, target, ids, policy, gamma, max_new_tokens, seed=seed)  # noqa: E731
        return _Run(*timed(work, target.device))

    speculative(prompts[0])  # the first call pays for start-up work of both models
    pairs = []
    for index, ids in enumerate(prompts):
        if index % 2:
            fast = speculative(ids)
            pairs.append((plain(ids), fast))
        else:
            pairs.append((plain(ids), speculative(ids)))
        if on_prompt is not None:
            on_prompt(index + 1, len(prompts))
    ratios = [fast.tokens_per_s / slow.tokens_per_s for slow, fast in pairs]
    fast_outputs = [fast.output for _, fast in pairs]
    return MeasuredSpeedup(
        gamma,
        _overall([slow for slow, _ in pairs]),
        _overall([fast for _, fast in pairs]),
        median_interval(ratios, bootstrap_samples, seed),
        sum(len(output.token_ids) for output in fast_outputs) / sum(output.steps for output in fast_outputs),
        len(pairs),
    )


def _overall(runs: Sequence[_Run]) -> float:
    """Return tokens a second over all runs."""
    return sum(len(run.output.token_ids) for run in runs) / sum(run.seconds for run in runs)
