"""What every schema checks its values with."""

from __future__ import annotations

from distillspec.errors import ConfigError


def require(condition: bool, message: str) -> None:
    """Raise `ConfigError(message)` unless the condition holds."""
    if not condition:
        raise ConfigError(message)


def check_seed(seed: int) -> None:
    require(0 <= seed < 1 << 63, f"seed={seed} must be in 0..2^63 - 1")


def one_of(key: str, value: str, choices: tuple[str, ...]) -> None:
    """Raise `ConfigError` for a word that is none of `choices`."""
    require(value in choices, f"{key}={value} is not known; use one of {', '.join(choices)}")
