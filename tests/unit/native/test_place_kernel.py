"""Tokens of accepted paths move within their slots: as torch moves them, in every tensor, and nothing else."""

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


def moves(slot: int, places: list[int], start: int) -> Tensor:
    """Return the moves of tokens of a slot to start, start + 1, …."""
    return torch.tensor([[slot] * len(places), places, list(range(start, start + len(places)))])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("places", [[12], [6, 7, 12], [6, 9, 10, 11, 19]])
def test_every_tensor_is_moved_as_torch_would(dtype: torch.dtype, places: list[int]) -> None:
    ours, expected = caches(dtype)
    PlaceMoves()(ours, moves(1, places, 5))
    for held in expected:
        held[1, :, 5 : 5 + len(places)] = held[1][:, places].clone()
    for own, other in zip(ours, expected, strict=True):
        assert torch.equal(own, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_several_slots_are_moved_at_once_as_one_after_another(dtype: torch.dtype) -> None:
    ours, expected = caches(dtype)
    apart = [moves(2, [4, 6, 7], 3), moves(0, [9], 8), moves(1, [3, 19], 1)]
    PlaceMoves()(ours, torch.cat(apart, 1))
    for slot in apart:
        PlaceMoves()(expected, slot)
    assert all(torch.equal(own, other) for own, other in zip(ours, expected, strict=True))
    assert not torch.equal(ours[0], caches(dtype)[0][0])


def test_without_a_compiler_torch_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, expected = caches(torch.float32)
    every = torch.cat([moves(2, [3, 8], 1), moves(0, [2, 3, 4], 1)], 1)
    PlaceMoves()(expected, every)
    monkeypatch.setattr(place_kernel, "place_kernel", lambda: None)
    PlaceMoves()(ours, every)
    assert all(torch.equal(own, other) for own, other in zip(ours, expected, strict=True))


def test_tensors_that_took_others_places_are_found() -> None:
    """A cache that was released and made anew, at other addresses."""
    move, (first, _), (second, expected) = PlaceMoves(), caches(torch.float32), caches(torch.float32)
    move(first, moves(0, [4], 2))
    untouched = [held.clone() for held in first]
    move(second, moves(0, [9, 11], 2))
    move(second[:1], moves(0, [15], 4))
    for held in expected:
        held[0, :, 2:4] = held[0][:, [9, 11]].clone()
    expected[0][0, :, 4] = expected[0][0, :, 15].clone()
    assert all(torch.equal(own, other) for own, other in zip(second, expected, strict=True))
    assert all(torch.equal(own, other) for own, other in zip(first, untouched, strict=True))


def test_a_tensor_of_another_width_at_the_same_address_is_found() -> None:
    move, memory = PlaceMoves(), torch.arange(2 * 1 * 10 * 8.0)
    wide, narrow = memory.view(2, 1, 10, 8), memory[:40].view(2, 1, 10, 2)
    move([wide], moves(0, [5], 3))
    expected = narrow.clone()
    expected[1, :, 2] = expected[1, :, 7].clone()
    move([narrow], moves(1, [7], 2))
    assert torch.equal(narrow, expected)
