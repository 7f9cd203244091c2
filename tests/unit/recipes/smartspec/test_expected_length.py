"""Expected tokens of trees, exact and as the paper prints them."""

from __future__ import annotations

import itertools
import math

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


@pytest.mark.parametrize("widths", [(), (2,), (3, 2), (1, 1, 1), (3, 2, 2)])
def test_expected_tokens_are_those_of_every_outcome(widths: tuple[int, ...]) -> None:
    acceptance = [[0.5, 0.2, 0.1], [0.4, 0.3, 0.05], [0.6, 0.0, 0.1]]
    expected = 0.0
    for outcome in itertools.product(range(4), repeat=3):  # each head's right candidate, 3 for none
        chances = [[*head, 1 - sum(head)][right] for head, right in zip(acceptance, outcome, strict=True)]
        depth = 0
        while depth < len(widths) and outcome[depth] < widths[depth]:
            depth += 1
        expected += math.prod(chances) * (1 + depth)
    assert full_tree(acceptance, widths) == pytest.approx(expected)


def test_a_chain_is_a_tree_of_width_one_and_the_paper_leaves_the_root_out() -> None:
    assert full_tree([[0.7]] * 3, (1, 1, 1)) == pytest.approx((1 - 0.7**4) / 0.3)
    root_alone = 1 - 0.7
    assert paper_eq10([0.7] * 3, (1, 1, 1)) + root_alone == pytest.approx((1 - 0.7**4) / 0.3)
    assert paper_eq10([0.7] * 3, (2, 2, 2)) != pytest.approx(full_tree([[0.7, 0.21]] * 3, (2, 2, 2)), rel=0.05)
