"""Settings of training: the optimizer, the trackers, the processes."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import dataclass, field

from distillspec.config.checks import list_of, one_of, require


@dataclass
class TrainConfig:
    """The optimisation. A run ends at the first of its limits in steps, minutes and tokens."""

    max_steps: int | None = None
    max_minutes: float | None = None  # minutes of the training loop, evaluations and saves included
    max_tokens: int | None = None
    learning_rate: float = 1.5e-3
    schedule: str = "wsd"  # cosine | wsd | constant
    warmup_fraction: float = 0.03  # share of the run in which the rate rises
    decay_fraction: float = 0.3  # wsd: share of the run at its end in which the rate decays to 0
    weight_decay: float = 0.0
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip_norm: float = 1.0
    batch_tokens: int = 768  # tokens per micro-batch, prompts included
    row_tokens: int = 768  # length of a packed row; a longer sample gets a row of its own length
    accumulate: int = 1  # micro-batches per step
    eval_every: int | None = None  # steps between evaluations; null: ten in a run, fewer where eval_share requires
    eval_share: float = 0.15  # largest share of max_minutes for evaluations; the last one always runs
    save_every: int | None = None  # steps between checkpoints besides those at evaluations
    keep_checkpoints: int = 2
    eval_max_prompts: int = 32  # held-out prompts that choose the checkpoint, at most half; the rest give the figures
    max_bad_steps: int = 5  # losses or gradients in a row with NaN or infinity that stop the run
    unroll: int = 3  # drafts that read states: drafted positions that a step trains, each fed the draft's own states
    unroll_decay: float = 0.5  # share of the drafted chains that go on to each further position
    unroll_weights: list[float] | None = (
        None  # weight of the loss at each drafted position; null: what unroll_decay gives
    )
    unroll_from: float | None = None  # share of a run with the first position alone; null: .75 for features, else .35
    feature_gib: float | None = None  # memory for the target's states of training text; null: a third of what is free
    target_rate: float = 0.02  # draft.train_target: the target's learning rate, as a share of train.learning_rate
    target_warmup: float = 0.2  # draft.train_target: share of the run in which the heads learn alone
    target_weight: float = 1.0  # draft.train_target: weight of KL(old target ‖ new target) beside the heads' loss
    mean: str = "token"  # of the loss: over tokens | sequence (over answers, each of which counts alike)
    dtype: str = "auto"  # dtype of forward and backward; weights stay float32

    def __post_init__(self) -> None:
        one_of("train.schedule", self.schedule, ("cosine", "wsd", "constant"))
        one_of("train.mean", self.mean, ("token", "sequence"))
        one_of("train.dtype", self.dtype, ("auto", "float32", "bfloat16"))
        limits = (self.max_steps, self.max_minutes, self.max_tokens)
        require(
            any(limit is not None for limit in limits),
            "the run has no end: set train.max_minutes, train.max_steps or train.max_tokens",
        )
        for key in ("max_steps", "max_minutes", "max_tokens", "eval_every", "save_every"):
            value = getattr(self, key)
            require(value is None or value > 0, f"train.{key}={value} must be above 0")
        for key in ("batch_tokens", "accumulate", "keep_checkpoints", "max_bad_steps", "eval_max_prompts", "unroll"):
            require(getattr(self, key) >= 1, f"train.{key}={getattr(self, key)} must be at least 1")
        require(self.row_tokens >= 2, f"train.row_tokens={self.row_tokens} must be at least 2 (a prompt and an answer)")
        require(
            0 < self.learning_rate < math.inf, f"train.learning_rate={self.learning_rate} must be above 0 and finite"
        )
        require(
            0 <= self.weight_decay < math.inf, f"train.weight_decay={self.weight_decay} must be at least 0 and finite"
        )
        list_of("train.betas", self.betas, (int, float), "numbers")
        require(
            len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas),
            f"train.betas={self.betas} must be two numbers in [0, 1)",
        )
        require(0 < self.unroll_decay <= 1, f"train.unroll_decay={self.unroll_decay} must be above 0 and at most 1")
        if self.unroll_weights is not None:
            list_of("train.unroll_weights", self.unroll_weights, (int, float), "numbers")
            require(
                all(0 <= weight < math.inf for weight in self.unroll_weights) and any(self.unroll_weights[:1]),
                f"train.unroll_weights={self.unroll_weights} must be finite numbers from 0 on, the first above 0",
            )
        alone = self.unroll_from
        require(alone is None or 0 <= alone < 1, f"train.unroll_from={alone} must be in [0, 1)")
        require(
            self.feature_gib is None or self.feature_gib >= 0,
            f"train.feature_gib={self.feature_gib} must be at least 0",
        )
        require(0 < self.target_rate <= 1, f"train.target_rate={self.target_rate} must be above 0 and at most 1")
        require(0 <= self.target_warmup < 1, f"train.target_warmup={self.target_warmup} must be in [0, 1)")
        require(
            0 < self.target_weight < math.inf, f"train.target_weight={self.target_weight} must be above 0 and finite"
        )
        require(0 < self.eval_share < 1, f"train.eval_share={self.eval_share} must be between 0 and 1")
        require(self.clip_norm > 0, f"train.clip_norm={self.clip_norm} must be above 0")
        require(0 <= self.warmup_fraction < 1, f"train.warmup_fraction={self.warmup_fraction} must be in [0, 1)")
        require(0 <= self.decay_fraction <= 1, f"train.decay_fraction={self.decay_fraction} must be in [0, 1]")
        require(
            self.batch_tokens >= self.row_tokens,
            f"train.batch_tokens={self.batch_tokens} is below train.row_tokens={self.row_tokens}; a row would not fit",
        )


@dataclass
class TrackerConfig:
    """A tracker for curves, besides metrics.jsonl."""

    kind: str = "none"  # none | wandb | tensorboard
    project: str = "distillspec"
    name: str | None = None
    tags: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        one_of("tracker.kind", self.kind, ("none", "wandb", "tensorboard"))
        list_of("tracker.tags", self.tags, (str,), "words")
        require(
            self.kind == "none" or importlib.util.find_spec(self.kind) is not None,
            f"tracker={self.kind} needs the package {self.kind}; pip install {self.kind}, or use tracker=none",
        )


@dataclass
class LauncherConfig:
    """The processes that train."""

    kind: str = "local"  # local (one process) | ddp | fsdp | deepspeed_zero2 | deepspeed_zero3
    num_processes: int = 1

    def __post_init__(self) -> None:
        one_of("launcher.kind", self.kind, ("local", "ddp", "fsdp", "deepspeed_zero2", "deepspeed_zero3"))
        require(self.num_processes >= 1, f"launcher.num_processes={self.num_processes} must be at least 1")
        require(
            self.kind != "local" or self.num_processes == 1,
            f"launcher=local runs one process, not {self.num_processes}; use launcher=ddp, fsdp or deepspeed_zero2",
        )
