"""Settings of `distill profile`: times of forward passes on this machine."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.checks import check_seed, require
from distillspec.config.models import ServedDraftConfig, TargetConfig, check_drafts


@dataclass
class ProfileConfig:
    """The grid of passes to time."""

    contexts: list[int] = field(default_factory=lambda: [32, 128, 384, 768])  # cached tokens a row
    rows: list[int] = field(default_factory=lambda: [1, 2, 4, 8])  # rows of a batch
    lengths: list[int] = field(default_factory=lambda: [0, 1, 2, 4, 6])  # drafted tokens a row
    prompts: list[int] = field(default_factory=lambda: [32, 64, 128, 256, 512])  # prompt tokens read in a step
    rounds: int = 5  # times each pass is measured, for the median
    held_out: float = 0.25  # share of the grid that tests the fit
    compile: bool = False  # CPU: compile passes first
    pack_weights: bool = True  # as in the engine

    def __post_init__(self) -> None:
        for name, least in (("contexts", 1), ("rows", 1), ("lengths", 0), ("prompts", 1)):
            values = getattr(self, name)
            require(
                bool(values) and min(values) >= least,
                f"profile.{name}={values} must name numbers of at least {least}",
            )
        for name in ("contexts", "rows"):
            values = getattr(self, name)
            require(len(set(values)) >= 2, f"profile.{name}={values} must name two numbers: one shows no slope")
        require(max(self.lengths) >= 1, f"profile.lengths={self.lengths} must name a length of at least 1")
        require(self.rounds >= 1, f"profile.rounds={self.rounds} must be at least 1")
        require(0 < self.held_out <= 0.5, f"profile.held_out={self.held_out} must be above 0 and at most 0.5")


@dataclass
class ProfileCommand:
    """`distill profile`: time passes of target and drafts on this machine, for the length controller."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: ServedDraftConfig = field(default_factory=ServedDraftConfig)
    drafts: list[str] = field(default_factory=list)  # several, in place of draft.path
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_drafts(self.draft, self.drafts)
