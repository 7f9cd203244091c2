"""Zeroing of what a key/value cache holds and nobody reads any more."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from distillspec.models.paged_cache import PagedCache
from distillspec.models.slot_cache import SlotCache


def wipe(cache: SlotCache, texts: Mapping[int, int]) -> None:
    """Zero all keys, values and states in a cache, but those of some slots' first places: slot → places."""
    if isinstance(cache, PagedCache):
        _wipe_pages(cache, texts)
        return
    for slot in range(cache.slots):
        cache.clear(slot, texts.get(slot, 0))


def _wipe_pages(cache: PagedCache, texts: Mapping[int, int]) -> None:
    kept = cache.pages.places(texts)
    unused = [page for page in range(1 + cache.pages.count) if page not in kept]
    rows = torch.tensor(unused, device=cache.table.device)
    for cached in cache.tensors():
        cached.index_fill_(0, rows, 0)
        for page, used in kept.items():
            cached[page, :, used:].zero_()
