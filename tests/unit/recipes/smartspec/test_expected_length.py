"""Expected tokens of trees, exact and as the paper prints them."""

from __future__ import annotations

import pytest

from distillspec.errors import ConfigError
from distillspec.recipes.smartspec.expected_length import full_tree, paper_eq10


def test_expected_lengths_of_trees() -> None:
    assert full_tree([[0.6], [0.5]]) == pytest.approx(1 + 0.6 + 0.3)
    assert full_tree([[0.6, 0.2], [0.5, 0.1]]) == pytest.approx(1 + 0.8 + 0.8 * 0.6)
    # One head, one candidate: its token and the target's own if it is accepted, nothing if not.
    assert paper_eq10([0.6], [1]) == pytest.approx(2 * 0.6)
    assert paper_eq10([0.6, 0.5], [2, 1]) == pytest.approx(2 * 0.5 * 0.84 + 3 * 0.84 * 0.5)
    for impossible in (lambda: full_tree([[0.7, 0.5]]), lambda: paper_eq10([0.5], [1, 2])):
        with pytest.raises(ConfigError):
            impossible()
