"""Settings of `distill quality`: what a lossy verification does to answers, and what it gains."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from distillspec.config.checks import check_seed, list_of, one_of, require
from distillspec.config.engine import VERIFICATIONS, EngineConfig, check_named_drafts
from distillspec.config.evaluation import SamplingConfig
from distillspec.config.models import DraftPathConfig, TargetConfig, check_drafts


@dataclass
class QualityConfig:
    """The same prompts, answered by each verification in turn."""

    prompts: list[str] = field(default_factory=list)  # files with `prompt`, and `response`: its last number is right
    verifications: list[str] = field(default_factory=lambda: ["exact", "typical"])  # the first is compared with
    count: int = 64  # prompts, files in turns
    rounds: int = 8  # parts of the prompts, in each of which verifications take turns
    max_tokens: int = 256  # an answer
    longest_prompt: int = 512  # tokens; longer prompts are left out

    def __post_init__(self) -> None:
        list_of("quality.prompts", self.prompts, (str,), "files")
        list_of("quality.verifications", self.verifications, (str,), "verifications")
        named = self.verifications
        require(bool(named), "name the verifications to compare: quality.verifications=[exact,typical]")
        require(len(set(named)) == len(named), f"quality.verifications={named} names one twice")
        for name in named:
            one_of("quality.verifications", name, VERIFICATIONS)
        for key in ("count", "rounds", "max_tokens", "longest_prompt"):
            require(getattr(self, key) >= 1, f"quality.{key}={getattr(self, key)} must be at least 1")
        require(
            self.rounds <= self.count,
            f"quality.rounds={self.rounds} is above quality.count={self.count}: a round needs a prompt",
        )


@dataclass
class QualityCommand:
    """`distill quality`: accuracy, likelihood and diversity of answers by lossy verifications, beside their speed."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftPathConfig = field(default_factory=DraftPathConfig)
    drafts: list[str] = field(default_factory=list)  # several, in place of draft.path
    engine: EngineConfig = field(default_factory=EngineConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    quality: QualityConfig = field(default_factory=QualityConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_drafts(self.draft, self.drafts)
        if not self.drafts:
            check_named_drafts(self.engine, ())
        require(bool(self.quality.prompts), "name the prompts to answer: quality.prompts=[FILE,FILE]")
        require(
            self.engine.is_exact or self.engine.verification in self.quality.verifications,
            f"engine.verification={self.engine.verification} is not in "
            f"quality.verifications={self.quality.verifications}, which are compared; leave it out",
        )
        require(
            self.sampling.temperature > 0,
            "sampling.temperature=0: greedy answers are exact in every mode; give a temperature above 0",
        )
        for name in self.quality.verifications:
            self.settings(name)

    def settings(self, verification: str) -> EngineConfig:
        """Return the engine's settings with one of the verifications.

        Raises:
            ConfigError: the others do not fit it.
        """
        return replace(self.engine, verification=verification)
