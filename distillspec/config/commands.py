"""One schema a command."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.checks import check_seed, one_of, require
from distillspec.config.data import DataConfig
from distillspec.config.engine import EngineConfig
from distillspec.config.evaluation import EvaluationConfig, SamplingConfig
from distillspec.config.loss import LossConfig
from distillspec.config.models import DraftConfig, DraftPathConfig, TargetConfig
from distillspec.config.serving import ServerConfig
from distillspec.config.training import LauncherConfig, TrackerConfig, TrainConfig


@dataclass
class TrainCommand:
    """`distill train`: distil a draft from the target."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=lambda: TrainConfig(max_minutes=10))
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    seed: int = 0
    resume: str | None = None  # a run folder to continue

    def __post_init__(self) -> None:
        check_seed(self.seed)
        require(
            self.loss.temperature == 1.0 or self.data.signal == "none",
            f"loss.temperature={self.loss.temperature} needs the live target: add data.signal=none "
            "(a stored signal is the target's at temperature 1)",
        )
        require(
            self.data.generator == "slots" or self.launcher.kind == "local",
            f"data.generator={self.data.generator} samples in one process; use launcher=local or data.generator=slots",
        )


@dataclass
class InitDraftCommand:
    """`distill init-draft`: write an untrained draft."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass
class GenerateCommand:
    """`distill generate`: write responses, with the teacher's signal on request, into shards."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftPathConfig = field(default_factory=DraftPathConfig)  # source=draft or mixed: who writes
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # of the held-out answers
    seed: int = 0
    resume: str | None = None  # a run folder to continue

    def __post_init__(self) -> None:
        check_seed(self.seed)
        require(
            self.draft.path is not None or not self.data.on_policy,
            f"data.source={self.data.source} needs the draft that writes: draft.path=FOLDER",
        )
        by_draft = self.data.source == "draft" or (self.data.source == "mixed" and self.data.mixed_by == "sequence")
        require(
            not by_draft or self.data.signal == "none",
            f"data.signal={self.data.signal} cannot be recorded while the draft writes; use data.signal=none",
        )


@dataclass
class EvalCommand:
    """`distill eval`: acceptance, block efficiency and predicted speed-up of one or more drafts."""

    drafts: list[str] = field(default_factory=list)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        require(bool(self.drafts), "name the drafts to judge: drafts=[FOLDER, FOLDER]")


@dataclass
class ExportCommand:
    """`distill export`: a folder that vLLM, SGLang or plain transformers load."""

    draft: DraftPathConfig = field(default_factory=DraftPathConfig)
    format: str = "hf"  # hf | vllm | sglang
    dtype: str = "auto"  # of the weights; auto: float32 for hf, bfloat16 for the engines
    gamma: int = 4  # speculation length in the printed command
    target: TargetConfig = field(default_factory=TargetConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        require(bool(self.draft.path), "name the draft to export: draft.path=FOLDER")
        one_of("format", self.format, ("hf", "vllm", "sglang"))
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        require(self.gamma >= 1, f"gamma={self.gamma} must be at least 1")
        check_seed(self.seed)


@dataclass
class ReportCommand:
    """`distill report`: one self-contained HTML page about runs."""

    runs: list[str] = field(default_factory=list)
    title: str = "Distilling a draft"
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        require(bool(self.runs), "name the run folders to report on: runs=[FOLDER, FOLDER]")


@dataclass
class ServeCommand:
    """`distill serve`: OpenAI's HTTP interface in front of the engine, with a dashboard."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftPathConfig = field(default_factory=DraftPathConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    server: ServerConfig = field(default_factory=ServerConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


COMMANDS: dict[str, type] = {
    "init-draft": InitDraftCommand,
    "train": TrainCommand,
    "eval": EvalCommand,
    "generate": GenerateCommand,
    "export": ExportCommand,
    "report": ReportCommand,
    "serve": ServeCommand,
}
