"""Bounds of the server's settings."""

from __future__ import annotations

import pytest

from distillspec.config import ServerConfig
from distillspec.config.serving import MOST_N, MOST_PROMPTS
from distillspec.errors import ConfigError


@pytest.mark.parametrize(("name", "most"), [("max_n", MOST_N), ("max_prompts", MOST_PROMPTS)])
def test_a_bound_above_what_a_request_may_ask_for_is_refused(name: str, most: int) -> None:
    """A body is refused beyond it, whatever the setting says."""
    assert getattr(ServerConfig(**{name: most}), name) == most
    with pytest.raises(ConfigError, match=rf"server\.{name}={most + 1} must be at most {most}"):
        ServerConfig(**{name: most + 1})
