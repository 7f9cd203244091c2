"""Settings of `distill simulate`: a machine and its load."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from distillspec.config.checks import require


@dataclass
class ModelFigures:
    """Size of a model, from which the times of its passes follow. params=0: there is no such model."""

    params: float = 0.0  # weights, of all experts in a mixture of experts
    bytes_per_param: float = 2.0
    kv_bytes: float = 0.0  # keys and values of one token in all layers
    overhead_s: float = 0.0  # fixed part of a pass: launches, all-reduces, scheduling, text
    expert_params: float = 0.0  # weights of one expert in all layers, part of params; 0: a dense model
    experts: int = 0  # experts per layer
    active: int = 0  # experts per token

    def check(self, key: str) -> None:
        for name in ("params", "kv_bytes", "overhead_s", "expert_params"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"{key}.{name}={value} must be finite and at least 0")
        require(self.bytes_per_param > 0, f"{key}.bytes_per_param={self.bytes_per_param} must be above 0")
        require(
            (self.experts == 0) == (self.active == 0) == (self.expert_params == 0) and self.active <= self.experts,
            f"{key}: experts={self.experts}, active={self.active}, expert_params={self.expert_params} belong together",
        )
        require(
            self.experts * self.expert_params <= self.params,
            f"{key}.expert_params={self.expert_params}: {self.experts} experts have more than params={self.params}",
        )


@dataclass
class HardwareConfig:
    """A machine with target and draft. The YAML files show the arithmetic."""

    title: str = ""
    bandwidth: float = 2.0e12  # bytes per second, of all GPUs together
    bandwidth_share: float = 0.8  # share that reading weights and caches reaches
    flops: float = 3.0e14  # FLOP per second, of all GPUs together
    flops_share: float = 0.4  # share that batches of a few hundred tokens reach
    memory: float = 8.0e10  # bytes, of all GPUs together
    memory_share: float = 0.9  # share for weights and caches
    target: ModelFigures = field(default_factory=ModelFigures)
    draft: ModelFigures = field(default_factory=ModelFigures)
    draft_free_s: float = 0.0005  # seconds of a step's proposals without a draft model
    draft_at_once: bool = False  # one pass of the draft gives all of a row's tokens (draft=block); without one: heads
    drafts: dict[str, ModelFigures] = field(default_factory=dict)  # several by name, in place of draft
    slots: int = 256  # the most requests at a time
    max_len: int = 4096  # tokens of prompt and answer
    prefill_chunk: int = 2048  # prompt tokens read per step
    cache_tokens: int | None = None  # tokens that fit the KV caches; null: by memory
    padded_attention: bool = False  # attention reads as many keys for every row as the longest one has
    batch_expansion: bool = False  # verification reads a row's context once per token, as vLLM's first scorer did
    micro_batches: int = 1  # parts of a step, one drafted on other devices while another is verified; 0: the best
    recorded_tokens: int = 0  # passes of up to so many tokens are padded to recorded ones (CUDA graphs); 0: none are
    noise: float = 0.0  # relative standard deviation of step times
    profile: str | None = None  # profile.json of distill profile: measured times in place of derived ones

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "memory"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"hardware.{name}={value} must be finite and above 0")
            share = getattr(self, f"{name}_share")
            require(0 < share <= 1, f"hardware.{name}_share={share} must be in (0, 1]")
        for name in ("draft_free_s", "noise"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"hardware.{name}={value} must be finite and at least 0")
        for name, least in (
            ("slots", 1),
            ("max_len", 2),
            ("prefill_chunk", 1),
            ("cache_tokens", 2),
            ("micro_batches", 0),
            ("recorded_tokens", 0),
        ):
            value = getattr(self, name)
            require(value is None or value >= least, f"hardware.{name}={value} must be at least {least}")
        self.target.check("hardware.target")
        self.draft.check("hardware.draft")
        for name, draft in self.drafts.items():
            draft.check(f"hardware.drafts.{name}")
            require(draft.params > 0, f"hardware.drafts.{name}.params={draft.params} must be above 0")


@dataclass
class WorkloadConfig:
    """The requests: arrivals, lengths, acceptance.

    Lengths are lognormal around their mean. A `spread` is the standard deviation of the logarithm (0: all alike). A
    drafted token is accepted with probability `alpha` on average. The other settings vary it around that.
    """

    requests: int = 400
    rates: list[float] = field(default_factory=lambda: [1.0, 4.0, 16.0])  # arrivals a second (Poisson), a run each
    trace: str | None = None  # JSONL of arrival_s, prompt_tokens, output_tokens, in place of rates and lengths
    prompt_tokens: float = 128.0
    prompt_spread: float = 0.0
    output_tokens: float = 128.0
    output_spread: float = 0.0
    alpha: float = 0.7
    sibling_alpha: float | None = 0.3  # of a sibling where those before it were rejected; null: as the first one's
    request_spread: float = 0.0  # standard deviation of α between requests
    token_spread: float = 0.0  # standard deviation of α between positions, which the draft's confidence shows
    burst_tokens: float = 0.0  # mean length of stretches of high and low α; 0: none
    burst_depth: float = 0.0  # distance of α from its mean in them
    alphas: dict[str, Any] = field(default_factory=dict)  # of several drafts: domain → draft → its α
    drift: float = 0.0  # change of α from the first request to the last, around its mean

    def __post_init__(self) -> None:
        require(self.requests >= 1, f"workload.requests={self.requests}: the workload is empty; at least 1")
        require(
            bool(self.rates) or self.trace is not None, "workload.rates=[] is empty; give arrivals a second, or a trace"
        )
        for rate in self.rates:
            require(0 < rate < float("inf"), f"workload.rates: {rate} must be finite and above 0 arrivals a second")
        for name, least in (("prompt_tokens", 1), ("output_tokens", 1)):
            value = getattr(self, name)
            require(least <= value < float("inf"), f"workload.{name}={value} must be at least {least}")
        for name in ("prompt_spread", "output_spread", "request_spread", "token_spread", "burst_tokens", "burst_depth"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"workload.{name}={value} must be finite and at least 0")
        require(0 <= self.alpha <= 1, f"workload.alpha={self.alpha} must be in [0, 1]")
        sibling = self.sibling_alpha
        require(sibling is None or 0 <= sibling <= 1, f"workload.sibling_alpha={sibling} must be in [0, 1], or null")
        for domain, alphas in self.alphas.items():
            require(
                isinstance(alphas, dict),
                f"workload.alphas.{domain}={alphas} must be chances by draft: {{A: 0.7}}",
            )
            for draft, alpha in alphas.items():
                number = isinstance(alpha, int | float) and 0 <= alpha <= 1
                require(number, f"workload.alphas.{domain}.{draft}={alpha} must be a number in [0, 1]")
        require(-1 <= self.drift <= 1, f"workload.drift={self.drift} must be in [-1, 1]")
        for name in ("request_spread", "token_spread"):
            value, most = getattr(self, name), (self.alpha * (1 - self.alpha)) ** 0.5
            require(
                value == 0 or value < most,
                f"workload.{name}={value} is more than chances of mean alpha={self.alpha} can vary; below {most:.3f}",
            )
