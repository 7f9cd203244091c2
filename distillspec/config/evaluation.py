"""Settings of evaluation: the deployed sampling policy and the measurements."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distillspec.config.checks import list_of, require

if TYPE_CHECKING:
    from distillspec.types import SamplingPolicy


@dataclass
class SamplingConfig:
    """The sampling policy in deployment, under which acceptance is measured."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        require(
            0 <= self.temperature < math.inf,
            f"sampling.temperature={self.temperature} must be at least 0 (0 is greedy) and finite",
        )
        require(self.top_k >= 0, f"sampling.top_k={self.top_k} must be at least 0 (0 is off)")
        require(0 < self.top_p <= 1, f"sampling.top_p={self.top_p} must be in (0, 1]")
        require(0 <= self.min_p <= 1, f"sampling.min_p={self.min_p} must be in [0, 1]")

    @property
    def policy(self) -> SamplingPolicy:
        """The distribution that these settings make of logits."""
        from distillspec.types import SamplingPolicy  # imports torch: --help does without

        return SamplingPolicy(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass
class EvaluationConfig:
    """Measures of an evaluation."""

    speculation_length: int = 8  # longest speculation length that is evaluated
    bootstrap_samples: int = 1000  # resamples for the confidence intervals
    measure_cost: bool = True  # time draft and target steps on this machine
    cost_batches: list[int] = field(default_factory=lambda: [1, 8])  # batch sizes of those timings
    measure_speedup: bool = False  # answer prompts one at a time, with and without the draft
    speedup_batches: list[int] = field(default_factory=list)  # numbers of prompts that are answered side by side too
    speedup_prompts: int = 8  # or groups of prompts, as far as there are so many
    speedup_tokens: int = 96

    def __post_init__(self) -> None:
        require(
            1 <= self.speculation_length <= 32,
            f"evaluation.speculation_length={self.speculation_length} must be in 1..32",
        )
        require(
            10 <= self.bootstrap_samples <= 100_000,
            f"evaluation.bootstrap_samples={self.bootstrap_samples} must be in 10..100000",
        )
        list_of("evaluation.cost_batches", self.cost_batches, (int,), "batch sizes")
        require(
            bool(self.cost_batches) and min(self.cost_batches) >= 1,
            f"evaluation.cost_batches={self.cost_batches} must name batch sizes of at least 1",
        )
        list_of("evaluation.speedup_batches", self.speedup_batches, (int,), "batch sizes")
        require(
            all(batch >= 2 for batch in self.speedup_batches),
            f"evaluation.speedup_batches={self.speedup_batches} must be batch sizes above 1, which is always measured",
        )
        for key in ("speedup_prompts", "speedup_tokens"):
            require(getattr(self, key) >= 1, f"evaluation.{key}={getattr(self, key)} must be at least 1")
