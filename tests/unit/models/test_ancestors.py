"""Ancestor bits say what walking up the tree says."""

from __future__ import annotations

import random

import pytest
import torch

from distillspec.models.ancestors import WORD, ancestor_mask, ancestor_words


@pytest.mark.parametrize("width", [1, 5, WORD - 1, WORD, WORD + 1, 3 * WORD + 7])
def test_bits_are_the_nodes_on_the_way_up(width: int) -> None:
    chance = random.Random(width)
    rows = [[chance.randrange(-1, node) for node in range(width)] for _ in range(3)]
    mask = ancestor_mask(torch.from_numpy(ancestor_words(rows, width)))
    for row, parents in enumerate(rows):
        for node in range(width):
            way, up = set(), node
            while up >= 0:
                way.add(up)
                up = parents[up]
            assert set(mask[row, node].nonzero().flatten().tolist()) == way


def test_nodes_without_a_parent_given_continue_a_chain() -> None:
    mask = ancestor_mask(torch.from_numpy(ancestor_words([[], [-1, 0, 0]], 5)))
    assert torch.equal(mask[0], torch.ones(5, 5, dtype=torch.bool).tril())
    assert mask[1].int().tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1],
    ]


def test_what_is_kept_of_a_shape_is_the_same_for_every_row_that_has_it() -> None:
    fork = [-1, -1, 0, 1, 2, 3]  # two branches of three
    first = ancestor_words([fork, [-1, 0, 1]], 6)
    first[:] = 0
    again = ancestor_words([fork, fork], 6)
    assert again[:, :, 0].tolist() == [[0b1, 0b10, 0b101, 0b1010, 0b10101, 0b101010]] * 2
    assert ancestor_words([fork[:4]], 4).tolist() == again[:1, :4].tolist(), "a smaller fork is the larger one's corner"
