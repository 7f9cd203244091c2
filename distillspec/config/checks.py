"""Checks that all schemas share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from distillspec.config.registry import Choice
from distillspec.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_seed(seed: int) -> None:
    require(0 <= seed < 1 << 63, f"seed={seed} must be in 0..2^63 - 1")


def list_of(key: str, values: Sequence[Any], kinds: tuple[type, ...], said: str) -> None:
    """Raise `ConfigError` for an entry of another type. OmegaConf checks plain entries, not lists inside lists."""
    wrong = [value for value in values if not isinstance(value, kinds)]
    require(not wrong, f"{key} must be a list of {said}, not {values}")


def chosen_from(table: Mapping[str, Choice], default: str | None) -> Any:
    """Return a dataclass field for a name in `table`, which `--help` lists."""
    return field(default=default, metadata={"choices": table})


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` for a word that is none of `choices`."""
    require(value in choices, f"{key}={value} is not known; use one of {', '.join(choices)}")
