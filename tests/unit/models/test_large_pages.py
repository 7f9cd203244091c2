"""Tensors on large pages: the same numbers, one behind another, alive as long as one of them is."""

from __future__ import annotations

import sys

import pytest
import torch

from distillspec.models.large_pages import ALIGNED, ALONE, BLOCK, LARGE, LargePages, kept_alone

linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these pages")


@linux
def test_tensors_lie_one_behind_another() -> None:
    pages, generator = LargePages(), torch.Generator().manual_seed(0)
    given = [torch.randn(size, generator=generator) for size in (7, 300, 64)]
    held = [pages.keep(each) for each in given]
    assert all(torch.equal(a, b) for a, b in zip(held, given, strict=True))
    assert held[0].data_ptr() % LARGE == 0
    assert [each.data_ptr() - held[0].data_ptr() for each in held] == [0, ALIGNED, ALIGNED + 1216]


@linux
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.int8, torch.uint8])
def test_any_dtype_and_shape(dtype: torch.dtype) -> None:
    given = torch.arange(120).reshape(2, 3, 20).to(dtype)
    held = LargePages().keep(given.transpose(0, 2))
    assert held.is_contiguous()
    assert held.dtype == dtype
    assert torch.equal(held, given.transpose(0, 2))


@linux
def test_what_does_not_fit_begins_a_block_and_the_one_before_lives_on() -> None:
    pages = LargePages()
    first = pages.keep(torch.full((BLOCK // 4 - 8,), 3.0))
    second = pages.keep(torch.full((BLOCK // 4 + 1000,), 5.0))
    del pages
    assert second.data_ptr() % LARGE == 0
    assert bool((first == 3).all())
    assert bool((second == 5).all())


def test_small_tensors_get_no_pages_of_their_own() -> None:
    small, large = torch.zeros(10), torch.ones(ALONE // 4)
    assert kept_alone(small) is small
    assert torch.equal(kept_alone(large), large)


def test_elsewhere_tensors_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    given = torch.ones(3)
    assert LargePages().keep(given) is given


def test_an_empty_tensor_stays() -> None:
    given = torch.ones(0, 3)
    assert LargePages().keep(given) is given


def test_without_memory_a_tensor_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr("distillspec.models.large_pages.mmap.mmap", refuse)
    given = torch.ones(3)
    assert LargePages().keep(given) is given
