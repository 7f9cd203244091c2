"""Settings of earlier versions, and the line for users who still give them."""

from __future__ import annotations

from dataclasses import fields

from distillspec.config.engine import EngineConfig, SamplingEngineConfig

SAMPLING_ENGINE = ("train", "eval", "init-draft")  # commands with `SamplingEngineConfig`
NOT_RANDOM = ("export", "report", "replay", "versions")
NOT_OF_SAMPLING = {"engine"} | {
    f"engine.{name}"
    for name in {field.name for field in fields(EngineConfig)} - {field.name for field in fields(SamplingEngineConfig)}
}


def removed(command: str, key: str) -> str | None:
    """Return the line about a removed setting `key`, None for a key that was never one."""
    if command in SAMPLING_ENGINE and key in NOT_OF_SAMPLING:
        return (
            f"{key} is no longer a setting of distill {command}: the engine that samples there takes "
            "engine.max_slots and engine.speculation_length"
        )
    if command in NOT_RANDOM and key == "seed":
        return f"seed is no longer a setting of distill {command}: nothing in it is random"
    return None
