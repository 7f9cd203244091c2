"""A running mean begins with the first value, and follows later ones by their weight."""

from __future__ import annotations

import pytest

from distillspec.serving.base.running_mean import running_mean


def test_the_first_value_is_the_mean_and_later_ones_move_it() -> None:
    assert running_mean(None, 4.0, 0.1) == 4.0
    assert running_mean(4.0, 4.0, 0.1) == 4.0
    assert running_mean(4.0, 14.0, 0.1) == pytest.approx(5.0)
