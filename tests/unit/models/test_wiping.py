"""What is wiped is zero, and the text that is kept is as it was."""

from __future__ import annotations

import pytest
import torch

from distillspec.models.paged_cache import PagedCache
from distillspec.models.pages import Pages
from distillspec.models.slot_cache import SlotCache
from distillspec.models.wiping import wipe

SLOTS, MAX_LEN, SIZE = 4, 70, 16
TEXTS = {0: 33, 2: 16}


def caches() -> dict[str, SlotCache]:
    lazy, plain = SlotCache(SLOTS, MAX_LEN), SlotCache(SLOTS, MAX_LEN)
    pages = Pages(SLOTS, MAX_LEN, 16, SIZE)
    for slot, tokens in ((0, 60), (1, 40), (2, 48)):
        pages.resize(slot, tokens)
    paged = PagedCache.of(SlotCache(SLOTS, MAX_LEN), pages, torch.device("cpu"))
    paged.change_table(*map(torch.from_numpy, paged.table_changes()))
    like = torch.ones(1, 2, 1, 8)
    for cache in (lazy, paged):
        cache.layer(0, like)
        cache.state_ids = (1,)
        cache.kept_states(like, 3)
    plain.layers[0] = (torch.zeros(SLOTS, 2, MAX_LEN + 1, 8), torch.zeros(SLOTS, 2, MAX_LEN + 1, 8))
    found = {"lazy": lazy, "plain": plain, "paged": paged}
    for cache in found.values():
        for held in cache.tensors():
            held.fill_(1.0)
    return found


@pytest.mark.parametrize("kind", ["lazy", "plain", "paged"])
def test_all_but_the_text_of_some_slots_is_zero(kind: str) -> None:
    cache = caches()[kind]
    wipe(cache, TEXTS)
    for held in cache.tensors():
        kept = sum(float(cache.text(held, slot, tokens).sum()) for slot, tokens in TEXTS.items())
        assert kept == float(held.sum()) == sum(TEXTS.values()) * held.shape[1] * held.shape[3]


@pytest.mark.parametrize("kind", ["lazy", "plain", "paged"])
def test_without_a_text_nothing_is_left(kind: str) -> None:
    cache = caches()[kind]
    wipe(cache, {})
    assert not any(held.any() for held in cache.tensors())


def test_a_page_that_two_slots_share_keeps_the_longer_text() -> None:
    pages = Pages(2, 64, 8, SIZE)
    pages.resize(0, 32)
    pages.share(1, 0, 32, 32)
    assert pages.places({0: 20, 1: 32}) == {pages.tables[0][0]: 16, pages.tables[0][1]: 16}
