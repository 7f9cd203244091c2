"""What is simulated: a machine, and the requests that come to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from distillspec.config.checks import require


@dataclass
class ModelFigures:
    """A model's size, from which the times of its passes follow; params=0: there is none."""

    params: float = 0.0  # weights that a token is multiplied with (of all experts, in a mixture of experts)
    bytes_per_param: float = 2.0
    kv_bytes: float = 0.0  # keys and values of one token in all layers
    overhead_s: float = 0.0  # of a pass, whatever it reads: launches, all-reduces, scheduling, text
    expert_params: float = 0.0  # of one expert in all layers together, counted in params; 0: the model is dense
    experts: int = 0  # of a layer
    active: int = 0  # experts that a token uses

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
    """A machine and its two models; the YAML files show the arithmetic."""

    title: str = ""
    bandwidth: float = 2.0e12  # bytes a second, of all GPUs together
    bandwidth_share: float = 0.8  # of it that weights and caches are read with
    flops: float = 3.0e14  # a second, of all GPUs together
    flops_share: float = 0.4  # of it that batches of a few hundred tokens reach
    memory: float = 8.0e10  # bytes, of all GPUs together
    memory_share: float = 0.9  # of it for weights and caches
    target: ModelFigures = field(default_factory=ModelFigures)
    draft: ModelFigures = field(default_factory=ModelFigures)
    draft_free_s: float = 0.0005  # of a step's proposals that come without a model
    slots: int = 256  # requests side by side
    max_len: int = 4096  # tokens of prompt and answer
    prefill_chunk: int = 2048  # prompt tokens read a step
    cache_tokens: int | None = None  # tokens that fit the caches; null: from memory
    batch_expansion: bool = False  # verification reads a row's context once for each token, as vLLM's first scorer did
    noise: float = 0.0  # standard deviation of step times, relative
    profile: str | None = None  # profile.json of distill profile: its times in place of those that follow from figures

    def __post_init__(self) -> None:
        for name in ("bandwidth", "flops", "memory"):
            value = getattr(self, name)
            require(0 < value < float("inf"), f"hardware.{name}={value} must be finite and above 0")
            share = getattr(self, f"{name}_share")
            require(0 < share <= 1, f"hardware.{name}_share={share} must be in (0, 1]")
        for name in ("draft_free_s", "noise"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"hardware.{name}={value} must be finite and at least 0")
        for name, least in (("slots", 1), ("max_len", 2), ("prefill_chunk", 1), ("cache_tokens", 2)):
            value = getattr(self, name)
            require(value is None or value >= least, f"hardware.{name}={value} must be at least {least}")
        self.target.check("hardware.target")
        self.draft.check("hardware.draft")


@dataclass
class WorkloadConfig:
    """The requests: when they come, how long they are, how well they are drafted.

    Lengths are lognormal around their mean, `spread` being the standard deviation of the logarithm (0: all alike). The
    chance that a drafted token stands is `alpha` on average; the other settings say how it varies around that.
    """

    requests: int = 400
    rates: list[float] = field(default_factory=lambda: [1.0, 4.0, 16.0])  # arrivals a second (Poisson), one run each
    trace: str | None = None  # JSONL of requests in place of rates and lengths: arrival_s, prompt_tokens, output_tokens
    prompt_tokens: float = 128.0
    prompt_spread: float = 0.0
    output_tokens: float = 128.0
    output_spread: float = 0.0
    alpha: float = 0.7
    request_spread: float = 0.0  # standard deviation of α from request to request
    token_spread: float = 0.0  # of a token's chance from position to position; the draft's confidence tells it
    burst_tokens: float = 0.0  # mean length of easy and hard stretches; 0: none
    burst_depth: float = 0.0  # how far α lies above its mean in easy ones, and below in hard ones
    drift: float = 0.0  # what α changes by from the first request to the last, half of it either way

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
        require(-1 <= self.drift <= 1, f"workload.drift={self.drift} must be in [-1, 1]")
        for name in ("request_spread", "token_spread"):
            value, most = getattr(self, name), (self.alpha * (1 - self.alpha)) ** 0.5
            require(
                value == 0 or value < most,
                f"workload.{name}={value} is more than chances of mean alpha={self.alpha} can vary; below {most:.3f}",
            )
