"""The schema of each command, and the table of commands."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.bench import BenchCommand
from distillspec.config.checks import check_seed, list_of, one_of, require
from distillspec.config.data import DataConfig
from distillspec.config.engine import CUT, TREES, EngineConfig, SamplingEngineConfig, check_named_drafts
from distillspec.config.evaluation import EvaluationConfig, SamplingConfig
from distillspec.config.loss import LossConfig
from distillspec.config.models import DraftConfig, DraftPathConfig, TargetConfig
from distillspec.config.online_commands import AdaptCommand, ReplayCommand, VersionsCommand
from distillspec.config.profile import ProfileCommand
from distillspec.config.quality import QualityCommand
from distillspec.config.serve import ServeCommand
from distillspec.config.simulation import HardwareConfig, WorkloadConfig
from distillspec.config.train_stop import TrainStopCommand
from distillspec.config.training import LauncherConfig, TrackerConfig, TrainConfig


@dataclass
class TrainCommand:
    """`distill train`: distil a draft from the target."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    loss: LossConfig = field(default_factory=lambda: LossConfig(name="jsd_kl"))
    data: DataConfig = field(default_factory=DataConfig)
    engine: SamplingEngineConfig = field(default_factory=SamplingEngineConfig)  # samples with data.generator=engine
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
        weights, positions = self.train.unroll_weights, self.draft.trained_positions(self.train.unroll)
        require(
            weights is None or positions is None or len(weights) == positions,
            f"train.unroll_weights={weights} must be {positions} numbers, one for each drafted position that trains",
        )
        if self.draft.train_target:
            require(
                not self.data.on_policy,
                f"data.source={self.data.source} needs a target that stays, and draft.train_target=true trains it; use "
                "data=teacher or data=fixed",
            )
            require(
                self.launcher.kind == "local",
                f"draft.train_target=true trains in one process, not with launcher={self.launcher.kind}; use "
                "launcher=local",
            )
            require(
                self.loss.select_fraction is None,
                f"loss.select_fraction={self.loss.select_fraction} compares with a draft of the same target, which "
                "draft.train_target=true changes; leave one of them out",
            )


@dataclass
class InitDraftCommand:
    """`distill init-draft`: write an untrained draft."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: SamplingEngineConfig = field(default_factory=SamplingEngineConfig)  # samples with data.generator=engine
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


@dataclass
class GenerateCommand:
    """`distill generate`: write responses with the teacher's signal into shards."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftPathConfig = field(default_factory=DraftPathConfig)  # the writer with data=draft or data=mixed
    data: DataConfig = field(default_factory=DataConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)  # samples with data.generator=engine
    sampling: SamplingConfig = field(default_factory=SamplingConfig)  # of the held-out answers
    seed: int = 0
    resume: str | None = None  # a run folder to continue

    def __post_init__(self) -> None:
        check_seed(self.seed)
        check_named_drafts(self.engine, ())
        require(
            self.data.cache is None,
            f"data.cache={self.data.cache}: distill generate writes a data folder of its own; leave it out",
        )
        require(
            self.draft.path is not None or not self.data.on_policy,
            f"data.source={self.data.source} needs the draft that writes: draft.path=FOLDER",
        )
        require(
            self.draft.path is None or self.data.on_policy,
            f"draft.path={self.draft.path} writes nothing in data.source={self.data.source}; "
            "use data=draft or data=mixed",
        )


@dataclass
class EvalCommand:
    """`distill eval`: acceptance, block efficiency and predicted speed-up of one or more drafts.

    Uses the held-out prompts of the first draft's own run, less those that trained or chose one of the drafts.
    data.prompts=FILE or data.cache=RUN names others. If no draft has its run beside it, the target writes prompts.
    """

    drafts: list[str] = field(default_factory=list)
    target: TargetConfig = field(default_factory=TargetConfig)
    data: DataConfig = field(default_factory=DataConfig)
    engine: SamplingEngineConfig = field(default_factory=SamplingEngineConfig)  # samples with data.generator=engine
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        list_of("drafts", self.drafts, (str,), "folders")
        require(bool(self.drafts) and all(self.drafts), "name the drafts to judge: drafts=[FOLDER, FOLDER]")


@dataclass
class ExportCommand:
    """`distill export`: a folder that vLLM, SGLang, speculators or plain transformers load."""

    draft: DraftPathConfig = field(default_factory=DraftPathConfig)
    format: str = "hf"  # hf | vllm | sglang | speculators
    dtype: str = "auto"  # of the weights; auto: float32 for hf, bfloat16 for engines
    speculation_length: int = 4  # in the printed command
    target: TargetConfig = field(default_factory=TargetConfig)

    def __post_init__(self) -> None:
        require(bool(self.draft.path), "name the draft to export: draft.path=FOLDER")
        one_of("format", self.format, ("hf", "vllm", "sglang", "speculators"))
        one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        require(1 <= self.speculation_length <= 32, f"speculation_length={self.speculation_length} must be in 1..32")


@dataclass
class ReportCommand:
    """`distill report`: one self-contained HTML page about runs."""

    runs: list[str] = field(default_factory=list)
    title: str = "Distilling a draft"

    def __post_init__(self) -> None:
        list_of("runs", self.runs, (str,), "folders")
        require(bool(self.runs) and all(self.runs), "name the run folders to report on: runs=[FOLDER, FOLDER]")


@dataclass
class SimulateCommand:
    """`distill simulate`: the scheduler and length controllers on a simulated machine and load."""

    hardware: HardwareConfig = field(default_factory=HardwareConfig)
    workload: WorkloadConfig = field(default_factory=WorkloadConfig)
    policies: list[str] = field(default_factory=lambda: ["none", "fixed-3", "fixed-5", "goodput"])
    selections: list[str] = field(default_factory=list)  # of hardware.drafts, each with each policy; or a draft's name
    speculation_length: int = 5  # the most tokens a row drafts where the policy chooses
    tree: str | None = None  # of goodput's policies: off | sampled | topk | fork | given; null: sampled
    widths: list[int] = field(default_factory=list)  # the most children of a node, by level; empty: the tree's default
    nodes: int = 32  # the most tokens of a tree
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        require(bool(self.policies), "name the policies to compare: policies=[none,fixed-3,goodput]")
        require(self.speculation_length >= 1, f"speculation_length={self.speculation_length} must be at least 1")
        one_of("tree", self.tree or "sampled", tuple(tree for tree in TREES if tree not in CUT))
        _ = self.tree_settings

    @property
    def tree_settings(self) -> EngineConfig:
        """The engine's settings of trees.

        Raises:
            ConfigError: they contradict each other.
        """
        return EngineConfig(
            tree=self.tree, widths=self.widths, nodes=self.nodes, speculation_length=self.speculation_length
        )


COMMANDS: dict[str, type] = {
    "init-draft": InitDraftCommand,
    "train": TrainCommand,
    "train-stop": TrainStopCommand,
    "eval": EvalCommand,
    "generate": GenerateCommand,
    "export": ExportCommand,
    "report": ReportCommand,
    "adapt": AdaptCommand,
    "replay": ReplayCommand,
    "versions": VersionsCommand,
    "bench": BenchCommand,
    "quality": QualityCommand,
    "profile": ProfileCommand,
    "simulate": SimulateCommand,
    "serve": ServeCommand,
}
