from __future__ import annotations

import math

import pytest
import torch

from distillspec.errors import ConfigError
from distillspec.losses import select_tokens


def test_the_tokens_furthest_behind_the_reference_are_chosen() -> None:
    draft = torch.tensor([5.0, 1.0, 3.0, 9.0, 2.0])
    reference = torch.tensor([5.0, 0.0, 0.5, 8.5, 3.0])  # gaps 0, 1, 2.5, 0.5, −1
    assert select_tokens(draft, reference, 0.4).tolist() == [False, True, True, False, False]
    assert select_tokens(draft, reference, 1.0).all()
    assert select_tokens(draft, reference, 0.01).tolist() == [False, False, True, False, False]


def test_ties_go_to_earlier_tokens_and_the_count_is_exact() -> None:
    assert select_tokens(torch.ones(10), torch.zeros(10), 0.3).tolist() == [True] * 3 + [False] * 7


def test_invalid_positions_are_neither_chosen_nor_counted() -> None:
    valid = torch.tensor([False, True, True, True, True, False])
    gap = torch.tensor([9.0, 1.0, 2.0, 3.0, 4.0, 9.0])
    assert select_tokens(gap, torch.zeros(6), 0.5, valid).nonzero().flatten().tolist() == [3, 4]
    assert not select_tokens(gap, torch.zeros(6), 0.5, torch.zeros(6).bool()).any()


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="fraction=0"):
        select_tokens(torch.ones(2), torch.ones(2), 0.0)
    with pytest.raises(ValueError, match="one shape"):
        select_tokens(torch.ones(2), torch.ones(3), 0.5)
    with pytest.raises(ValueError, match="not finite"):
        select_tokens(torch.tensor([math.nan, 1]), torch.ones(2), 0.5)
