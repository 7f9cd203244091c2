"""Tokens of an accepted path move within their slot: as torch moves them, in every tensor, and nothing else."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.native import place_kernel
from distillspec.native.place_kernel import PlaceMoves

SHAPES = ((3, 2, 20, 8), (3, 5, 32, 64), (3, 1, 40, 7))  # unlike layers, and states of one head


def caches(dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Return tensors of a cache, and as many that are equal."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    return made, [held.clone() for held in made]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("places", [[12], [6, 7, 12], [6, 9, 10, 11, 19]])
def test_every_tensor_is_moved_as_torch_would(dtype: torch.dtype, places: list[int]) -> None:
    ours, expected = caches(dtype)
    PlaceMoves()(ours, 1, torch.tensor(places), 5)
    for held in expected:
        held[1, :, 5 : 5 + len(places)] = held[1][:, places].clone()
    for own, other in zip(ours, expected, strict=True):
        assert torch.equal(own, other)


def test_without_a_compiler_torch_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, expected = caches(torch.float32)
    PlaceMoves()(expected, 2, torch.tensor([3, 8]), 1)
    monkeypatch.setattr(place_kernel, "place_kernel", lambda: None)
    PlaceMoves()(ours, 2, torch.tensor([3, 8]), 1)
    assert all(torch.equal(own, other) for own, other in zip(ours, expected, strict=True))


def test_tensors_that_took_others_places_are_found() -> None:
    """A cache that was released and made anew, at other addresses."""
    move, (first, _), (second, expected) = PlaceMoves(), caches(torch.float32), caches(torch.float32)
    move(first, 0, torch.tensor([4]), 2)
    untouched = [held.clone() for held in first]
    move(second, 0, torch.tensor([9, 11]), 2)
    move(second[:1], 0, torch.tensor([15]), 4)
    for held in expected:
        held[0, :, 2:4] = held[0][:, [9, 11]].clone()
    expected[0][0, :, 4] = expected[0][0, :, 15].clone()
    assert all(torch.equal(own, other) for own, other in zip(second, expected, strict=True))
    assert all(torch.equal(own, other) for own, other in zip(first, untouched, strict=True))


def test_a_tensor_of_another_width_at_the_same_address_is_found() -> None:
    move, memory = PlaceMoves(), torch.arange(2 * 1 * 10 * 8.0)
    wide, narrow = memory.view(2, 1, 10, 8), memory[:40].view(2, 1, 10, 2)
    move([wide], 0, torch.tensor([5]), 3)
    expected = narrow.clone()
    expected[1, :, 2] = expected[1, :, 7].clone()
    move([narrow], 1, torch.tensor([7]), 2)
    assert torch.equal(narrow, expected)
