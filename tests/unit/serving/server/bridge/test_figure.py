"""Texts of durations and sizes on the dashboard."""

from __future__ import annotations

import pytest

from distillspec.serving.server.bridge.figure import duration, size


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0.0 ms"), (0.0075, "7.5 ms"), (0.25, "250 ms"), (1.0, "1.00 s"), (61.25, "61.25 s")],
)
def test_a_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("count", "text"), [(0, "0 KiB"), (12 << 10, "12 KiB"), (3 << 19, "1.5 MiB")])
def test_a_size(count: int, text: str) -> None:
    assert size(count) == text
