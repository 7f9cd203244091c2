"""Putting a load on an engine, and comparing how policies bear it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from distillspec.config.checks import check_seed, list_of, require
from distillspec.config.engine import EngineConfig
from distillspec.config.evaluation import SamplingConfig
from distillspec.config.models import DraftPathConfig, TargetConfig


@dataclass
class BenchConfig:
    """Poisson arrivals, the same for every policy."""

    prompts: list[str] = field(default_factory=list)  # files with a column `prompt` (and `domain`), taken in turns
    policies: list[str] = field(default_factory=lambda: ["none", "fixed-2", "fixed-4", "goodput"])  # who is compared
    rates: list[float] = field(default_factory=lambda: [0.5])  # requests a second
    seconds: float = 30.0  # of arrivals, for each policy, rate and round
    rounds: int = 1  # policies take turns
    max_tokens: int = 64  # of an answer
    ignore_eos: bool = False  # every answer as long as it may be
    longest_prompt: int = 512  # tokens; longer prompts are left out

    def __post_init__(self) -> None:
        list_of("bench.prompts", self.prompts, (str,), "files")
        list_of("bench.policies", self.policies, (str,), "policies")
        require(bool(self.policies), "name the policies to compare: bench.policies=[none,fixed-2,goodput]")
        require(len(set(self.policies)) == len(self.policies), f"bench.policies={self.policies} names one twice")
        list_of("bench.rates", self.rates, (int, float), "requests a second")
        require(
            bool(self.rates) and all(0 < rate < math.inf for rate in self.rates),
            f"bench.rates={self.rates} must name rates above 0, in requests a second",
        )
        require(0 < self.seconds < math.inf, f"bench.seconds={self.seconds} must be above 0")
        for key in ("rounds", "max_tokens", "longest_prompt"):
            require(getattr(self, key) >= 1, f"bench.{key}={getattr(self, key)} must be at least 1")


@dataclass
class BenchCommand:
    """`distill bench`: a Poisson load on the engine, answered under several policies side by side."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftPathConfig = field(default_factory=DraftPathConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        require(bool(self.bench.prompts), "name the prompts to send: bench.prompts=[FILE,FILE]")
