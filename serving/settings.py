"""How an engine is set up."""

from __future__ import annotations

from dataclasses import dataclass

from distillspec.errors import ConfigError

PROPOSERS = ("none", "draft_model", "prompt_lookup", "lookup_else_model")
CONTROLLERS = ("fixed", "goodput", "smartspec")


@dataclass(frozen=True)
class EngineSettings:
    """All settings of an `Engine`, with their defaults.

    Args:
        dtype: auto (bfloat16 where the hardware multiplies it, else float32), float32, bfloat16, float16, float64.
        device: auto, cpu, cuda, cuda:1, …
        max_slots: the most requests side by side; fewer where memory is short.
        max_model_len: prompt and output together; None means what the model allows, at most 4,096.
        cache_gib: memory for the caches of target and draft together; None means half of what is free.
        max_cache_tokens: count on fewer tokens than the slots hold (mainly for tests of preemption).
        prefill_chunk: prompt tokens read a step; longer prompts take several, decoding goes on between.
        prefix_reuse: take over the keys and values of a beginning that another prompt shares.
        proposer: none, draft_model, prompt_lookup, lookup_else_model; None means draft_model where a draft is given.
        controller: who chooses speculation lengths: fixed, goodput (the most expected tokens a second, by row and step;
            learns costs and acceptance as it serves), or smartspec (the paper's algorithms, to compare with: one length
            a step, and requests are admitted by goodput; needs `profile`).
        speculation_length: drafted tokens a row and step; the most of them where the controller chooses.
        max_time_per_token_s: controller=goodput: expected seconds per output token that no request may exceed; a
            request's own goes first. Where that cannot be, the worst row is as near to it as can be.
        max_wait_s: controller=smartspec: a request that waited longer is admitted whatever goodput says.
        profile: folder or file that `distill profile` wrote: what passes cost here, so that goodput is known from the
            first step; refused where it is of other models or another machine.
        draft_confidence: stop drafting where the draft's best probability falls to this or below; 0 never.
        lookup_longest, lookup_shortest: n-gram sizes of prompt lookup.
        cuda_graphs: CUDA: record passes of few tokens once per shape and replay them.
        compile: CPU: compile passes of few tokens: auto (shapes in which half a minute was spent, where there is a C++
            compiler), True (every shape at once: minutes), False.
        pack_weights: float32 on CPU: keep weights packed for few rows too (more memory, much faster verification).
        seed: of the engine's own draws; requests with a seed do not depend on it.
    """

    dtype: str = "auto"
    device: str = "auto"
    max_slots: int = 16
    max_model_len: int | None = None
    cache_gib: float | None = None
    max_cache_tokens: int | None = None
    prefill_chunk: int = 512
    prefix_reuse: bool = True
    proposer: str | None = None
    controller: str = "fixed"
    speculation_length: int = 4
    max_time_per_token_s: float | None = None
    max_wait_s: float = 1.0
    profile: str | None = None
    draft_confidence: float = 0.0
    lookup_longest: int = 4
    lookup_shortest: int = 2
    cuda_graphs: bool = True
    compile: bool | str = "auto"
    pack_weights: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_slots", "prefill_chunk"):
            _require(getattr(self, name) >= 1, f"{name}={getattr(self, name)} must be at least 1")
        length = self.max_model_len
        _require(length is None or length >= 2, f"max_model_len={length} must be at least 2")
        _require(self.cache_gib is None or self.cache_gib > 0, f"cache_gib={self.cache_gib} must be above 0")
        tokens = self.max_cache_tokens
        _require(tokens is None or tokens >= 2, f"max_cache_tokens={tokens} must be at least 2")
        _require(
            self.proposer is None or self.proposer in PROPOSERS,
            f"proposer={self.proposer} is not known; use one of {', '.join(PROPOSERS)}",
        )
        _require(
            self.controller in CONTROLLERS,
            f"controller={self.controller} is not known; use one of {', '.join(CONTROLLERS)}",
        )
        _require(self.speculation_length >= 0, f"speculation_length={self.speculation_length} must be at least 0")
        bound = self.max_time_per_token_s
        _require(bound is None or bound > 0, f"max_time_per_token_s={bound} must be above 0 seconds")
        _require(
            bound is None or self.controller == "goodput",
            f"max_time_per_token_s={bound} needs controller=goodput, not {self.controller}",
        )
        _require(self.max_wait_s >= 0, f"max_wait_s={self.max_wait_s} must be at least 0 seconds")
        _require(
            self.profile is not None or self.controller != "smartspec",
            "controller=smartspec needs profile=FOLDER: measure this machine with distill profile",
        )
        _require(
            self.profile is None or self.controller != "fixed",
            f"profile={self.profile} is not used by controller=fixed; add controller=goodput, or leave it out",
        )
        _require(0 <= self.draft_confidence < 1, f"draft_confidence={self.draft_confidence} must be in [0, 1)")
        _require(
            1 <= self.lookup_shortest <= self.lookup_longest,
            f"lookup_shortest={self.lookup_shortest} must be between 1 and lookup_longest={self.lookup_longest}",
        )
        _require(self.compile in (True, False, "auto"), f"compile={self.compile} must be auto, True or False")


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise ConfigError(problem)
