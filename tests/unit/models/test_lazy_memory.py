"""Memory is taken page by page as it is written, and is given back as zeros."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest
import torch

from distillspec.models.lazy_memory import commits_lazily, give_back, lazy_zeros, tokens_a_page
from distillspec.models.slot_cache import SlotCache

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
PAGE = mmap.PAGESIZE


def resident(tensor: torch.Tensor) -> int:
    """Return the bytes of a tensor's mapping that are in memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = line.split(" ")[0].split("-")
        if len(bounds) == 2:
            inside = int(bounds[0], 16) <= tensor.data_ptr() < int(bounds[1], 16)
        elif inside and line.startswith("Private_Dirty:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("the tensor is in no mapping")


def test_only_what_was_written_takes_memory() -> None:
    zeros = lazy_zeros((64, 1 << 16), torch.float32)
    before = resident(zeros)
    assert not zeros[:8].any(), "reading takes none"
    zeros[3, 5] = 1.0
    zeros[40].fill_(2.0)
    assert resident(zeros) - before == PAGE + 4 * (1 << 16)


@pytest.mark.parametrize(("begin", "end"), [(0, 3000), (1024, 2048), (1000, 1020), (100, 2500), (5, 1024)])
def test_what_is_given_back_is_zero_and_the_rest_as_it_was(begin: int, end: int) -> None:
    ones = lazy_zeros((3000,), torch.float32).fill_(1.0)
    wanted = torch.ones(3000)
    wanted[begin:end] = 0
    give_back(ones[begin:end])
    assert torch.equal(ones, wanted)


def test_a_slots_memory_is_given_back() -> None:
    cache = SlotCache(4, 200)
    keys, _ = cache.layer(0, torch.zeros(1, 2, 1, 32))
    assert commits_lazily(keys.device)
    page = tokens_a_page(32 * 4)
    assert page == PAGE // 128
    for head in (keys[1, 0], keys[1, 1], keys[2, 0]):
        assert head.data_ptr() % PAGE == 0, "the places of each head begin a page"
    keys.fill_(torch.nan)
    full = resident(keys)
    cache.drop(1)
    assert not keys[1].any()
    assert full - resident(keys) == keys[1].nbytes
    cache.drop(2, 40)
    assert not keys[2, :, 40:].any()
    assert keys[2, :, :40].isnan().all()
    assert keys[3].isnan().all()
    cache.commit(2, 200)
    assert not keys[0, :, :200].any()


def test_memory_that_is_counted_when_it_is_asked_for_is_not_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: "2\n")
    assert not commits_lazily(torch.device("cpu"))
    cache = SlotCache(2, 8)
    keys, _ = cache.layer(0, torch.zeros(1, 2, 1, 4))
    assert keys.shape == (2, 2, 9, 4)
    keys.fill_(1.0)
    cache.drop(0)
    assert keys.all(), "nothing to give back"
    cache.clear(0, 3)
    assert not keys[0, :, 3:].any()
