"""Settings of `distill train-stop`: a draft that tells which of its tokens will be accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.checks import check_seed, one_of, require
from distillspec.config.evaluation import SamplingConfig
from distillspec.config.models import DraftPathConfig, TargetConfig

READS = ("probs", "state")


@dataclass
class StopConfig:
    """The small network that predicts acceptance, and its training."""

    reads: str = "probs"  # probs (the draft's best probabilities and its entropy) | state (what its head reads)
    width: int = 64  # of its hidden layers
    text: str | None = None  # run, data or online folder with answers of the target; null: the draft's run
    answers: int = 200  # of that text, of a log the newest; a fifth of them judges
    epochs: int = 20
    learning_rate: float = 1e-3

    def __post_init__(self) -> None:
        one_of("stop.reads", self.reads, READS)
        for name, least in (("width", 1), ("answers", 2), ("epochs", 1)):
            require(getattr(self, name) >= least, f"stop.{name}={getattr(self, name)} must be at least {least}")
        require(self.learning_rate > 0, f"stop.learning_rate={self.learning_rate} must be above 0")


@dataclass
class TrainStopCommand:
    """`distill train-stop`: teach a draft which of its tokens will be accepted, for engine.draft_confidence."""

    draft: DraftPathConfig = field(default_factory=DraftPathConfig)
    target: TargetConfig = field(default_factory=TargetConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    stop: StopConfig = field(default_factory=StopConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        require(bool(self.draft.path), "name the draft to teach: draft.path=FOLDER")
