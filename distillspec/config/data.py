"""Settings of prompts and of the text written to them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from distillspec.config.checks import one_of, require

if TYPE_CHECKING:
    from distillspec.types import SamplingPolicy


@dataclass
class DataConfig:
    """Prompts, and the text that is written to them."""

    prompts: str = "selfprompt"  # a JSON, JSONL, CSV or Parquet file, a Hub dataset, or selfprompt (by the target)
    split: str = "train"  # split of a Hub dataset
    prompt_field: str = "prompt"  # column of the file
    response_field: str = "response"
    domain_field: str = "domain"
    num_prompts: int | None = None  # null: all in the file, or 512 self-written ones
    max_minutes: float | None = None  # minutes of sampling (fixed: of scoring); finished answers are kept
    eval_prompts: int = 64  # held out, never trained on
    max_prompt_tokens: int = 512
    max_new_tokens: int = 256
    source: str = "teacher"  # writer of the responses: teacher | draft | mixed | fixed (the file)
    temperature: float = 1.0  # temperature of the training responses
    top_p: float = 1.0
    mixed_lambda: float = 0.5  # mixed: share that the draft writes
    mixed_by: str = "sequence"  # mixed: the writer changes by sequence | token
    mixed_with: str = "teacher"  # mixed by sequence: the rest is the teacher's | the file's (fixed)
    refresh_steps: int = 100  # draft, mixed: steps after which the current draft writes new text
    refresh_prompts: int = 64  # prompts answered at each refresh
    refresh_keep: int | None = None  # refreshes to train on at a time; null: 2 (loss=tvdpp: 1)
    signal: str = "topk"  # the target's, stored with the text: topk | sampled | hidden (exact) | none (a live target)
    signal_entries: int = 64  # log-probabilities or draws stored per token
    tail_draws: int = 4  # topk: draws from the tail per token, so that losses and α are unbiased; 6 bytes each
    state_ids: list[int] | None = None  # target's states stored with its text; null: those that the draft reads
    state_precision: str = "bf16"  # of states that are stored: bf16 | fp8, half the bytes
    cache: str | None = None  # run or folder of `distill generate`: its prompts, held-out answers, samples
    shard_sequences: int = 128  # samples per file
    batch_slots: int = 64  # sequences sampled side by side; for the engine see engine.max_slots
    generator: str = "slots"  # sampler: slots (one token per step) | engine (the serving engine)

    def __post_init__(self) -> None:
        one_of("data.source", self.source, ("fixed", "teacher", "draft", "mixed"))
        one_of("data.signal", self.signal, ("topk", "sampled", "hidden", "none"))
        one_of("data.state_precision", self.state_precision, ("bf16", "fp8"))
        one_of("data.generator", self.generator, ("slots", "engine"))
        one_of("data.mixed_by", self.mixed_by, ("sequence", "token"))
        one_of("data.mixed_with", self.mixed_with, ("teacher", "fixed"))
        require(0 <= self.mixed_lambda <= 1, f"data.mixed_lambda={self.mixed_lambda} must be in [0, 1]")
        require(0 <= self.temperature < math.inf, f"data.temperature={self.temperature} must be at least 0 and finite")
        require(bool(self.prompts), "data.prompts is empty; give a file, a Hub dataset id or selfprompt")
        require(0 < self.top_p <= 1, f"data.top_p={self.top_p} must be in (0, 1]")
        for key in (
            "eval_prompts",
            "max_prompt_tokens",
            "max_new_tokens",
            "refresh_steps",
            "refresh_prompts",
        ):
            require(getattr(self, key) >= 1, f"data.{key}={getattr(self, key)} must be at least 1")
        require(
            self.refresh_keep is None or self.refresh_keep >= 1,
            f"data.refresh_keep={self.refresh_keep} must be at least 1",
        )
        for key in ("signal_entries", "shard_sequences", "batch_slots"):
            require(getattr(self, key) >= 1, f"data.{key}={getattr(self, key)} must be at least 1")
        require(0 <= self.tail_draws <= 64, f"data.tail_draws={self.tail_draws} must be in 0..64")
        require(
            self.max_minutes is None or self.max_minutes > 0, f"data.max_minutes={self.max_minutes} must be above 0"
        )
        require(
            self.num_prompts is None or self.num_prompts >= 1,
            f"data.num_prompts={self.num_prompts} must be >= 1",
        )
        require(
            self.prompts != "selfprompt" or not self.uses_fixed_responses or self.cache is not None,
            "self-written prompts have no fixed responses; use data.source=teacher or data.prompts=FILE",
        )

    @property
    def policy(self) -> SamplingPolicy:
        """The policy that training responses are sampled under."""
        from distillspec.types import SamplingPolicy  # imports torch: --help does without

        return SamplingPolicy(temperature=self.temperature, top_p=self.top_p)

    @property
    def on_policy(self) -> bool:
        """True when the current draft writes all or some of the text."""
        return self.source in ("draft", "mixed")

    @property
    def uses_fixed_responses(self) -> bool:
        """True when responses are read from the file."""
        return self.source == "fixed" or (self.source == "mixed" and self.mixed_with == "fixed")
