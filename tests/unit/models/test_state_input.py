"""How states are read: fused as they are, scaled, or each behind a norm of its own."""

from __future__ import annotations

import pytest
import torch

from distillspec.models.state_input import JOINED, StateInput

WIDTH = 8


def input_of(norms: bool) -> StateInput:
    joins = StateInput(JOINED, [1, 3], WIDTH, WIDTH, norms=norms)
    with torch.no_grad():
        joins.fc.weight.normal_(generator=torch.Generator().manual_seed(1))  # type: ignore[operator, union-attr]
        if joins.norms is not None:
            joins.norms.weight.copy_(torch.linspace(0.5, 2, 2 * WIDTH))
    return joins


@torch.no_grad()
def test_each_state_is_normed_by_itself() -> None:
    joins, states = input_of(norms=True), torch.randn(5, 2 * WIDTH)
    low, high = (part / part.square().mean(-1, keepdim=True).sqrt() for part in states.chunk(2, -1))
    wanted = torch.cat([low, high], -1) * torch.linspace(0.5, 2, 2 * WIDTH)
    torch.testing.assert_close(joins.fuse(states), wanted @ joins.fc.weight.T)  # type: ignore[operator, union-attr]


@torch.no_grad()
def test_the_size_of_a_state_does_not_matter_behind_a_norm() -> None:
    states = torch.randn(5, 2 * WIDTH)
    larger = torch.cat([states[:, :WIDTH], 100 * states[:, WIDTH:]], -1)
    torch.testing.assert_close(*(input_of(norms=True).fuse(read) for read in (states, larger)))
    plain, more = (input_of(norms=False).fuse(read) for read in (states, larger))
    assert not torch.allclose(plain, more)


def test_norms_learn() -> None:
    joins = input_of(norms=True)
    joins.fuse(torch.randn(5, 2 * WIDTH)).square().sum().backward()
    assert joins.norms is not None
    assert joins.norms.weight.grad is not None
    assert bool((joins.norms.weight.grad != 0).all())


def test_no_matrix_takes_the_place_of_norms() -> None:
    with pytest.raises(AssertionError, match="no matrix norms states"):
        input_of(norms=True).fusion()
