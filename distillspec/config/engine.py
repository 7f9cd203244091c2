"""The serving engine: the `engine` group of the commands, and what `distillspec.serving` calls `EngineSettings`."""

from __future__ import annotations

from dataclasses import dataclass

from distillspec.config.checks import one_of, require

PROPOSERS = ("none", "draft_model", "prompt_lookup", "lookup_else_model")
ATTENTIONS = ("auto", "masked", "triton", "varlen")
CONTROLLERS = ("fixed", "goodput", "smartspec")
LENGTHS = ("request", "step", "global")


@dataclass
class EngineConfig:
    """How an engine runs its target and draft."""

    max_slots: int = 16  # the most requests side by side; fewer where memory is short
    max_model_len: int | None = None  # prompt and output together; null: what the model allows, at most 4,096
    cache_gib: float | None = None  # memory for the caches of target and draft; null: half of what is free
    max_cache_tokens: int | None = None  # count on fewer tokens than the slots hold; null: all
    prefill_chunk: int = 512  # prompt tokens read a step; decoding goes on between the parts of a long prompt
    prefix_reuse: bool = True  # take over the keys and values of a beginning that another prompt shares
    proposer: str | None = None  # none | draft_model | prompt_lookup | lookup_else_model; null: the draft if any
    controller: str = "goodput"  # who chooses lengths: goodput (most expected tokens a second) | fixed | smartspec
    speculation_length: int = 4  # drafted tokens a row and step; the most of them where the controller chooses
    lengths: str = "request"  # goodput: request (each row its own) | step (one for all) | global (one acceptance, too)
    max_time_per_token_s: float | None = None  # goodput: expected seconds per output token that no request may exceed
    max_wait_s: float = 1.0  # smartspec: a request that waited longer is admitted whatever goodput says
    profile: str | None = None  # what `distill profile` wrote: costs known from the first step; null: learnt live
    draft_confidence: float = 0.0  # stop drafting where the draft's best probability falls to this; 0: never
    lookup_longest: int = 4  # the longest n-gram of prompt lookup
    lookup_shortest: int = 2  # the shortest
    attention: str = "auto"  # auto (what works of triton and varlen on CUDA, else masked) | masked | triton | varlen
    cuda_graphs: bool = True  # CUDA: record passes of few tokens once a shape and replay them
    compile: bool | str = "auto"  # CPU passes of few tokens: auto (hot shapes) | true (every shape, minutes) | false
    pack_weights: bool = True  # float32 on CPU: weights packed for few rows too; more memory, faster verification
    seed: int = 0  # of the engine's own draws; requests with a seed do not depend on it

    def __post_init__(self) -> None:
        for name in ("max_slots", "prefill_chunk"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        for name in ("max_model_len", "max_cache_tokens"):
            value = getattr(self, name)
            require(value is None or value >= 2, f"{name}={value} must be at least 2")
        require(self.cache_gib is None or self.cache_gib > 0, f"cache_gib={self.cache_gib} must be above 0")
        if self.proposer is not None:
            one_of("proposer", self.proposer, PROPOSERS)
        one_of("attention", self.attention, ATTENTIONS)
        one_of("controller", self.controller, CONTROLLERS)
        one_of("lengths", self.lengths, LENGTHS)
        require(
            self.lengths == "request" or self.controller == "goodput",
            f"lengths={self.lengths} needs controller=goodput, not {self.controller}",
        )
        require(self.speculation_length >= 0, f"speculation_length={self.speculation_length} must be at least 0")
        bound = self.max_time_per_token_s
        require(bound is None or bound > 0, f"max_time_per_token_s={bound} must be above 0 seconds")
        require(
            bound is None or self.controller == "goodput",
            f"max_time_per_token_s={bound} needs controller=goodput, not {self.controller}",
        )
        require(self.max_wait_s >= 0, f"max_wait_s={self.max_wait_s} must be at least 0 seconds")
        require(
            self.profile is not None or self.controller != "smartspec",
            "controller=smartspec needs profile=FOLDER: measure this machine with distill profile",
        )
        require(
            self.profile is None or self.controller != "fixed",
            f"profile={self.profile} is not used by controller=fixed; add controller=goodput, or leave it out",
        )
        require(0 <= self.draft_confidence < 1, f"draft_confidence={self.draft_confidence} must be in [0, 1)")
        require(
            1 <= self.lookup_shortest <= self.lookup_longest,
            f"lookup_shortest={self.lookup_shortest} must be between 1 and lookup_longest={self.lookup_longest}",
        )
        require(self.compile in (True, False, "auto"), f"compile={self.compile} must be auto, true or false")
        require(self.seed >= 0, f"engine seed={self.seed} must be at least 0")
