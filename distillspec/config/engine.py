"""The serving engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class EngineConfig:
    """The engine, beside target and draft. The engine itself checks the values (`EngineSettings`)."""

    max_slots: int = 16  # answers side by side; fewer where memory is short
    max_model_len: int | None = None  # tokens of prompt and answer; null: what the model allows, at most 4,096
    cache_gib: float | None = None  # for the caches; null: half of what is free
    prefill_chunk: int = 512  # prompt tokens read a step
    prefix_reuse: bool = True  # take over what prompts share
    proposer: str | None = None  # none | draft_model | prompt_lookup | lookup_else_model; null: as there is a draft
    controller: str = "fixed"  # fixed | goodput
    speculation_length: int = 4  # drafted tokens a row and step; the most of them with goodput
    draft_confidence: float = 0.0  # stop drafting where the draft is less sure; 0: never
    compile: str | bool = "auto"  # CPU: auto | true | false
    pack_weights: bool = True  # CPU, float32: faster verification for more memory
    cuda_graphs: bool = True
    seed: int = 0  # of the engine's own draws
