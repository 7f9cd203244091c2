"""Ticks are few, round, and cover their range."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distillspec.report.axes import nice_ticks, tick_text


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_cover_the_range_with_few_round_steps(low: float, span: float) -> None:
    ticks = nice_ticks(low, low + span)
    step = ticks[1] - ticks[0]
    assert ticks[0] <= low + 1e-6 * step
    assert ticks[-1] >= low + span - 1e-6 * step
    assert 2 <= len(ticks) <= 8


@pytest.mark.parametrize(
    ("value", "text"), [(0.25, "0.25"), (3.0, "3"), (12_000, "12k"), (0.30000000000000004, "0.3"), (0, "0")]
)
def test_tick_texts_are_short(value: float, text: str) -> None:
    assert tick_text(value) == text
