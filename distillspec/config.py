"""The typed schema of every config group; defaults live here and nowhere else.

The YAML files in `conf/` only select and override. Values are checked in `__post_init__`, so a bad one is
refused before anything is loaded or written.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field
from typing import Any

from distillspec.errors import ConfigError
from distillspec.types import SamplingPolicy


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _check_seed(seed: int) -> None:
    _require(0 <= seed < 1 << 63, f"seed={seed} must be in 0..2^63 - 1")


def _one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    _require(value in choices, f"{key}={value} is not known; use one of {', '.join(choices)}")


@dataclass
class TargetConfig:
    """The model to be served. `path`: `smollm2`, `tiny`, a Hub id, a local folder or a .gguf file."""

    path: str = "smollm2"
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16 | float64
    device: str = "auto"

    def __post_init__(self) -> None:
        _one_of("target.dtype", self.dtype, ("auto", "float32", "bfloat16", "float16", "float64"))
        _require(bool(self.path), "target.path is empty; give a Hub id, a folder, a .gguf file or smollm2")


@dataclass
class DraftConfig:
    """The model to be trained. `kind`: pretrained | pruned | scratch."""

    kind: str = "pruned"
    path: str | None = None  # pretrained: Hub id or folder (an earlier distillspec draft too)
    layers: int | None = None  # pruned, scratch: how many layers
    keep: list[int] | None = None  # pruned: exactly these layers of the target
    select: str = "even"  # pruned: even | acceptance
    vocabulary: int | None = None  # keep only this many output tokens; null keeps all
    hidden_size: int = 256  # scratch
    heads: int = 4  # scratch
    train_embeddings: bool = False  # whether the input embeddings learn too

    def __post_init__(self) -> None:
        _one_of("draft.kind", self.kind, ("pretrained", "pruned", "scratch"))
        _one_of("draft.select", self.select, ("even", "acceptance"))
        _require(self.kind != "pretrained" or bool(self.path), "draft=pretrained needs draft.path=FOLDER_OR_ID")
        if self.layers is not None:
            _require(self.layers >= 1, f"draft.layers={self.layers} is impossible; keep at least 1 layer")
        if self.keep is not None:
            _require(len(self.keep) > 0, "draft.keep=[] keeps no layer; name at least one")
            _require(
                len(set(self.keep)) == len(self.keep) and min(self.keep) >= 0,
                f"draft.keep={self.keep} must be distinct layer numbers from 0",
            )
            _require(
                self.layers is None or self.layers == len(self.keep),
                f"draft.layers={self.layers} and draft.keep={self.keep} disagree; give one of them",
            )
        if self.vocabulary is not None:
            _require(
                self.vocabulary >= 16,
                f"draft.vocabulary={self.vocabulary} is too small; keep at least 16 tokens",
            )
        _require(
            self.heads >= 1 and self.hidden_size % self.heads == 0,
            f"draft.hidden_size={self.hidden_size} must be a multiple of draft.heads={self.heads}",
        )


@dataclass
class DraftPathConfig:
    """A finished draft: its folder, or the run that made it."""

    path: str | None = None


@dataclass
class LossConfig:
    """What the draft minimises: one named loss, or a weighted mix of them."""

    name: str = "fkl"  # ce | fkl | rkl | jsd | tvd | lk | lk_hybrid | tvdpp
    beta: float = 0.5  # jsd: weight of the target in the mixture
    eta: float = 3.0  # lk_hybrid: how fast KL gives way to acceptance
    mix: Any = None  # instead of name, weights: loss.mix={fkl:1,jsd:{weight:0.5,beta:0.1}}
    temperature: float = 1.0
    chunk_tokens: int | None = None  # loss positions whose logits exist at one time; null: by memory
    select_fraction: float | None = None  # AdaSPEC: train on this share of tokens only
    reference: str | None = None  # AdaSPEC: folder of the reference draft

    def __post_init__(self) -> None:
        _one_of("loss.name", self.name, ("ce", "fkl", "rkl", "jsd", "tvd", "lk", "lk_hybrid", "tvdpp"))
        _require(0 < self.beta < 1, f"loss.beta={self.beta} must be in (0, 1)")
        # Typed Any, since Hydra cannot put new keys into a typed dictionary from the command line.
        _require(
            self.mix is None or (isinstance(self.mix, dict) and bool(self.mix)),
            f"loss.mix={self.mix} must give losses a weight, as in loss.mix={{fkl:1,tvd:0.5}}",
        )
        _require(self.eta >= 0, f"loss.eta={self.eta} must be at least 0")
        _require(self.temperature > 0, f"loss.temperature={self.temperature} must be above 0")
        _require(
            self.chunk_tokens is None or self.chunk_tokens >= 1,
            f"loss.chunk_tokens={self.chunk_tokens} must be at least 1",
        )
        if self.select_fraction is not None:
            _require(
                0 < self.select_fraction <= 1,
                f"loss.select_fraction={self.select_fraction} must be in (0, 1]",
            )
            _require(
                self.reference is not None,
                "loss.select_fraction needs loss.reference=FOLDER (a draft to compare)",
            )

    @property
    def terms(self) -> dict[str, Any]:
        """The mix as `LossMix.parse` reads it."""
        if self.mix:
            return dict(self.mix)
        own = {"jsd": {"beta": self.beta}, "lk_hybrid": {"eta": self.eta}}.get(self.name, {})
        return {self.name: {"weight": 1.0, **own}}


@dataclass
class DataConfig:
    """Prompts and who answers them.

    `prompts`: `selfprompt` (the target writes them), a JSON/JSONL/CSV/Parquet file, or a Hub dataset id.
    `source`: fixed (responses from the file) | teacher | draft | mixed.
    """

    prompts: str = "selfprompt"
    split: str = "train"
    prompt_field: str = "prompt"
    response_field: str = "response"
    domain_field: str = "domain"
    num_prompts: int | None = None  # null: all in the file, or 512 self-written ones
    max_minutes: float | None = None  # end sampling early, with what is finished kept
    eval_prompts: int = 64  # held out, never trained on
    max_prompt_tokens: int = 512
    max_new_tokens: int = 256
    source: str = "teacher"
    temperature: float = 1.0  # how training responses are sampled
    top_p: float = 1.0
    mixed_lambda: float = 0.5  # share of the draft in source=mixed
    mixed_by: str = "sequence"  # sequence | token
    mixed_with: str = "teacher"  # who writes the rest: teacher | fixed
    refresh_steps: int = 100  # draft, mixed: sample anew from the current draft this often
    refresh_prompts: int = 64  # how many prompts each refresh answers
    signal: str = "topk"  # teacher signal kept with the data: topk | sampled | none (live teacher)
    signal_entries: int = 64
    cache: str | None = None  # data folder of `distill generate`: prompts, held-out answers, samples
    shard_sequences: int = 128
    batch_slots: int = 64  # sequences generated side by side
    generator: str = "slots"  # who samples: slots (one token a step) | engine (the serving engine)
    speculation_length: int = 0  # engine: tokens a step that the current draft drafts for the target

    def __post_init__(self) -> None:
        _one_of("data.source", self.source, ("fixed", "teacher", "draft", "mixed"))
        _one_of("data.signal", self.signal, ("topk", "sampled", "none"))
        _one_of("data.generator", self.generator, ("slots", "engine"))
        _require(self.speculation_length >= 0, f"data.speculation_length={self.speculation_length} must be at least 0")
        _require(
            self.speculation_length == 0 or self.generator == "engine",
            f"data.speculation_length={self.speculation_length} needs data.generator=engine",
        )
        _one_of("data.mixed_by", self.mixed_by, ("sequence", "token"))
        _one_of("data.mixed_with", self.mixed_with, ("teacher", "fixed"))
        _require(0 <= self.mixed_lambda <= 1, f"data.mixed_lambda={self.mixed_lambda} must be in [0, 1]")
        _require(self.temperature >= 0, f"data.temperature={self.temperature} must be at least 0")
        _require(0 < self.top_p <= 1, f"data.top_p={self.top_p} must be in (0, 1]")
        for key in (
            "eval_prompts",
            "max_prompt_tokens",
            "max_new_tokens",
            "refresh_steps",
            "refresh_prompts",
        ):
            _require(getattr(self, key) >= 1, f"data.{key}={getattr(self, key)} must be at least 1")
        for key in ("signal_entries", "shard_sequences", "batch_slots"):
            _require(getattr(self, key) >= 1, f"data.{key}={getattr(self, key)} must be at least 1")
        _require(
            self.max_minutes is None or self.max_minutes > 0, f"data.max_minutes={self.max_minutes} must be above 0"
        )
        _require(
            self.num_prompts is None or self.num_prompts >= 1,
            f"data.num_prompts={self.num_prompts} must be >= 1",
        )
        _require(
            self.prompts != "selfprompt" or not self.uses_fixed_responses,
            "self-written prompts have no fixed responses; use data.source=teacher or data.prompts=FILE",
        )

    @property
    def policy(self) -> SamplingPolicy:
        return SamplingPolicy(temperature=self.temperature, top_p=self.top_p)

    @property
    def on_policy(self) -> bool:
        """Whether the current draft writes (some of) what it learns from."""
        return self.source in ("draft", "mixed")

    @property
    def uses_fixed_responses(self) -> bool:
        """Whether responses are read from the file."""
        return self.source == "fixed" or (self.source == "mixed" and self.mixed_with == "fixed")


@dataclass
class TrainConfig:
    """The optimisation. A run ends at the first limit it meets among steps, minutes and tokens."""

    max_steps: int | None = None
    max_minutes: float | None = None
    max_tokens: int | None = None
    learning_rate: float = 1.5e-3
    schedule: str = "wsd"  # cosine | wsd | constant
    warmup_fraction: float = 0.03
    decay_fraction: float = 0.3  # wsd: the last share of the run, decaying to 0
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip_norm: float = 1.0
    batch_tokens: int = 768  # tokens a micro-batch, prompts included; many small steps beat few large ones
    row_tokens: int = 768  # length of a packed row
    accumulate: int = 1
    eval_every: int | None = None  # steps; null: ten times in a run
    save_every: int | None = None  # steps; null: with every evaluation
    keep_checkpoints: int = 2
    eval_max_prompts: int = 32
    max_bad_steps: int = 5  # non-finite losses or gradients in a row before the run stops
    dtype: str = "auto"  # of forward and backward; weights stay float32

    def __post_init__(self) -> None:
        _one_of("train.schedule", self.schedule, ("cosine", "wsd", "constant"))
        _one_of("train.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        limits = (self.max_steps, self.max_minutes, self.max_tokens)
        _require(
            any(limit is not None for limit in limits),
            "the run has no end: set train.max_minutes, train.max_steps or train.max_tokens",
        )
        for key in ("max_steps", "max_minutes", "max_tokens", "eval_every", "save_every"):
            value = getattr(self, key)
            _require(value is None or value > 0, f"train.{key}={value} must be above 0")
        for key in ("batch_tokens", "accumulate", "keep_checkpoints", "max_bad_steps", "eval_max_prompts"):
            _require(getattr(self, key) >= 1, f"train.{key}={getattr(self, key)} must be at least 1")
        _require(
            self.row_tokens >= 2, f"train.row_tokens={self.row_tokens} must be at least 2 (a prompt and an answer)"
        )
        _require(
            0 < self.learning_rate < math.inf, f"train.learning_rate={self.learning_rate} must be above 0 and finite"
        )
        _require(self.weight_decay >= 0, f"train.weight_decay={self.weight_decay} must be at least 0")
        _require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"train.betas={self.betas} must be two numbers in [0, 1)",
        )
        _require(self.clip_norm > 0, f"train.clip_norm={self.clip_norm} must be above 0")
        _require(0 <= self.warmup_fraction < 1, f"train.warmup_fraction={self.warmup_fraction} must be in [0, 1)")
        _require(0 <= self.decay_fraction <= 1, f"train.decay_fraction={self.decay_fraction} must be in [0, 1]")
        _require(
            self.batch_tokens >= self.row_tokens,
            f"train.batch_tokens={self.batch_tokens} is below train.row_tokens={self.row_tokens}; a row would not fit",
        )


@dataclass
class SamplingConfig:
    """The deployed policy, under which acceptance is measured."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self) -> None:
        _require(self.temperature >= 0, f"sampling.temperature={self.temperature} must be at least 0 (0 is greedy)")
        _require(self.top_k >= 0, f"sampling.top_k={self.top_k} must be at least 0 (0 is off)")
        _require(0 < self.top_p <= 1, f"sampling.top_p={self.top_p} must be in (0, 1]")
        _require(0 <= self.min_p <= 1, f"sampling.min_p={self.min_p} must be in [0, 1]")

    @property
    def policy(self) -> SamplingPolicy:
        return SamplingPolicy(self.temperature, self.top_k, self.top_p, self.min_p)


@dataclass
class EvaluationConfig:
    """How drafts are judged."""

    max_gamma: int = 8
    bootstrap_samples: int = 1000
    measure_cost: bool = True  # time draft and target steps on this machine
    cost_batches: list[int] = field(default_factory=lambda: [1, 8])
    measure_speedup: bool = False  # decode for real with the reference decoder
    speedup_prompts: int = 8
    speedup_tokens: int = 96

    def __post_init__(self) -> None:
        _require(1 <= self.max_gamma <= 32, f"evaluation.max_gamma={self.max_gamma} must be in 1..32")
        _require(
            self.bootstrap_samples >= 10,
            f"evaluation.bootstrap_samples={self.bootstrap_samples} must be at least 10",
        )
        _require(
            bool(self.cost_batches) and min(self.cost_batches) >= 1,
            f"evaluation.cost_batches={self.cost_batches} must name batch sizes of at least 1",
        )
        for key in ("speedup_prompts", "speedup_tokens"):
            _require(getattr(self, key) >= 1, f"evaluation.{key}={getattr(self, key)} must be at least 1")


@dataclass
class TrackerConfig:
    """Where curves go besides metrics.jsonl. `kind`: none | wandb | tensorboard."""

    kind: str = "none"
    project: str = "distillspec"
    name: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        _one_of("tracker.kind", self.kind, ("none", "wandb", "tensorboard"))
        _require(
            self.kind == "none" or importlib.util.find_spec(self.kind) is not None,
            f"tracker={self.kind} needs the package {self.kind}; pip install {self.kind}, or use tracker=none",
        )


@dataclass
class LauncherConfig:
    """How many processes train. `kind`: local | ddp | fsdp | deepspeed_zero2 | deepspeed_zero3."""

    kind: str = "local"
    num_processes: int = 1

    def __post_init__(self) -> None:
        _one_of("launcher.kind", self.kind, ("local", "ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"))
        _require(self.num_processes >= 1, f"launcher.num_processes={self.num_processes} must be at least 1")
        _require(
            self.kind != "local" or self.num_processes == 1,
            f"launcher=local runs one process, not {self.num_processes}; use launcher=ddp, fsdp or deepspeed_zero2",
        )


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
        _check_seed(self.seed)
        _require(
            self.loss.temperature == 1.0 or self.data.signal == "none",
            f"loss.temperature={self.loss.temperature} needs the live target: add data.signal=none "
            "(a stored signal is the target's at temperature 1)",
        )


@dataclass
class InitDraftCommand:
    """`distill init-draft`: write an untrained draft."""

    target: TargetConfig = field(default_factory=TargetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    data: DataConfig = field(default_factory=DataConfig)
    seed: int = 0

    def __post_init__(self) -> None:
        _check_seed(self.seed)


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
        _check_seed(self.seed)
        _require(
            self.draft.path is not None or not self.data.on_policy,
            f"data.source={self.data.source} needs the draft that writes: draft.path=FOLDER",
        )
        by_draft = self.data.source == "draft" or (self.data.source == "mixed" and self.data.mixed_by == "sequence")
        _require(
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
        _check_seed(self.seed)
        _require(bool(self.drafts), "name the drafts to judge: drafts=[FOLDER, FOLDER]")


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
        _require(bool(self.draft.path), "name the draft to export: draft.path=FOLDER")
        _one_of("format", self.format, ("hf", "vllm", "sglang"))
        _one_of("dtype", self.dtype, ("auto", "float32", "bfloat16", "float16"))
        _require(self.gamma >= 1, f"gamma={self.gamma} must be at least 1")
        _check_seed(self.seed)


@dataclass
class ReportCommand:
    """`distill report`: one self-contained HTML page about runs."""

    runs: list[str] = field(default_factory=list)
    title: str = "Distilling a draft"
    seed: int = 0

    def __post_init__(self) -> None:
        _check_seed(self.seed)
        _require(bool(self.runs), "name the run folders to report on: runs=[FOLDER, FOLDER]")


COMMANDS: dict[str, type] = {
    "init-draft": InitDraftCommand,
    "train": TrainCommand,
    "eval": EvalCommand,
    "generate": GenerateCommand,
    "export": ExportCommand,
    "report": ReportCommand,
}
