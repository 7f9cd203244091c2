"""A cache in pages holds what a cache of slots holds, in any order of pages, beside pages full of NaN."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import ValuesView
from random import Random

import pytest
import torch
from torch import Tensor

from distillspec.models.paged_cache import PagedCache
from distillspec.models.pages import Pages
from distillspec.models.ragged_attention import ragged_attention
from distillspec.models.slot_cache import Attend, SlotCache, SlotView, masked_attention

from .slot_cases import DEVICE, tree_view

SLOTS, MAX_LEN = 4, 150
ATTENTIONS: list[object] = [
    pytest.param(masked_attention, id="masked", marks=pytest.mark.numerics),
    pytest.param(
        ragged_attention,
        id="triton",
        marks=pytest.mark.skipif(
            importlib.util.find_spec("triton") is None or (DEVICE == "cpu" and "TRITON_INTERPRET" not in os.environ),
            reason="needs Triton, and a CUDA device or its interpreter (see tests/conftest.py)",
        ),
    ),
]


def updated(cache: PagedCache) -> None:
    """Bring the block table up to date."""
    if changes := cache.table_changes():
        cache.change_table(*(torch.from_numpy(part).to(DEVICE) for part in changes))


def paged(attend: Attend, lengths: list[int], size: int, seed: int, spare: int = 5) -> PagedCache:
    """A cache whose slots hold pages for `lengths` tokens, in an order that nobody would choose."""
    chance, needed = Random(seed), sum(-(-length // size) for length in lengths)
    pages = Pages(SLOTS, MAX_LEN, needed + spare, size)
    steps = [slot for slot, length in enumerate(lengths) for _ in range(-(-length // size))]
    chance.shuffle(steps)
    for place, slot in enumerate(steps):
        pages.resize(slot, min(lengths[slot], size * (1 + steps[:place].count(slot))))
    cache = PagedCache.of(SlotCache(SLOTS, MAX_LEN, attend), pages, torch.device(DEVICE))
    updated(cache)
    return cache


def view_of(cache: SlotCache, starts: list[int], counts: list[int], slots: list[int]) -> SlotView:
    return SlotView.append(cache, slots, torch.tensor(starts, device=DEVICE), torch.tensor(counts, device=DEVICE))


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def filled(cache: SlotCache, lengths: list[int], seed: int = 0) -> tuple[Tensor, Tensor]:
    """Write a text of these lengths to every slot, and NaN wherever a cache in pages has no text."""
    like = torch.zeros(1, 2, 1, 32, device=DEVICE)
    layer = cache.layer(0, like)
    if isinstance(cache, PagedCache):
        for held in layer:
            held.fill_(torch.nan)
    for slot, length in enumerate(lengths):
        view = view_of(cache, [0], [length], [slot])
        for place, held in enumerate(layer):
            view.write(held, noise(1, 2, length, 32, seed=seed + 10 * slot + place))
    return layer


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("size", [1, 16, 64])
@pytest.mark.parametrize("kind", ["chains", "trees", "window", "prompts", "trees in a window"])
def test_attention_over_pages_is_attention_over_slots(attend: Attend, size: int, kind: str) -> None:
    """The pages hold NaN wherever no text is, as pages do that a failed request gave back."""
    starts = [100, 1, 0, 47]
    counts = {"prompts": [40, 70, 90, 20]}.get(kind, [5, 5, 5, 5] if "trees" in kind else [4, 1, 3, 5])
    lengths = [start + count for start, count in zip(starts, counts, strict=True)]
    slots = [2, 0, 3, 1]
    by_slot = [lengths[slots.index(slot)] for slot in range(SLOTS)]
    cache, plain = paged(attend, by_slot, size, seed=size), SlotCache(SLOTS, MAX_LEN)
    query = noise(SLOTS, 4, max(counts), 32, seed=1)
    outputs = []
    for one, look in ((cache, attend), (plain, masked_attention)):
        layer = filled(one, by_slot)
        view = view_of(one, starts, counts, slots)
        view = tree_view(view, seed=3, chains=1) if "trees" in kind else view
        window = 30 if "window" in kind else None
        outputs.append(look(query, *layer, view, window=window)[view.places < MAX_LEN])
    assert outputs[0].isfinite().all()
    torch.testing.assert_close(outputs[0], outputs[1], atol=5e-6, rtol=1e-5)


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_a_row_that_runs_past_its_pages_stays_finite(attend: Attend) -> None:
    """A draft loop writes longer windows than some rows asked for. What page 0 holds is not looked at."""
    cache = paged(attend, [16, 40, 16, 16], 16, seed=0)
    layer = filled(cache, [16, 40, 16, 16])
    view = view_of(cache, [15, 30], [4, 4], [0, 1])
    for held in layer:
        view.write(held, noise(2, 2, 4, 32, seed=4))
        held[0] = torch.nan
    assert attend(noise(2, 4, 4, 32, seed=1), *layer, view).isfinite().all()


def test_what_padding_writes_goes_to_page_0() -> None:
    cache = paged(masked_attention, [20, 20, 20, MAX_LEN], 16, seed=1)
    layer = filled(cache, [20, 20, 20, MAX_LEN])
    before = [cache.text(layer[0], slot, length).clone() for slot, length in enumerate([20, 20, 20, MAX_LEN])]
    starts, none = torch.tensor([[20, 140], [0, 0]], device=DEVICE)
    view = SlotView.append(cache, [0, 3], starts, none, width=2)
    view.write(layer[0], torch.full((2, 2, 2, 32), torch.nan, device=DEVICE))
    for slot, text in enumerate(before):
        assert torch.equal(cache.text(layer[0], slot, text.shape[1]), text)


def test_the_accepted_paths_of_trees_move_within_their_pages() -> None:
    cache = paged(masked_attention, [60, 60, 60, 60], 16, seed=2)
    layer = filled(cache, [60, 60, 60, 60])
    before = [[cache.text(held, slot, 60).clone() for slot in range(4)] for held in layer]
    moves = [[1, 1, 1, 3], [33, 47, 58, 18], [31, 32, 33, 15]]
    cache.gather(torch.tensor(moves, device=DEVICE))
    for held, texts in zip(layer, before, strict=True):
        texts[1][:, 31:34] = texts[1][:, [33, 47, 58]]
        texts[3][:, 15] = texts[3][:, 18]
        for slot, text in enumerate(texts):
            assert torch.equal(cache.text(held, slot, 60), text)


def test_a_shared_prefix_is_read_by_both_and_written_by_neither() -> None:
    cache = paged(masked_attention, [60, 0, 16, 16], 16, seed=3)
    layer = filled(cache, [60, 0, 16, 16])
    pages = cache.pages
    before = [cache.text(held, 0, 60).clone() for held in layer]
    rest = pages.share(1, 0, 40, readable=59)
    pages.resize(1, 60)
    updated(cache)
    for move in pages.copies(1, rest, 40):
        cache.copy(*move)
    view = view_of(cache, [40], [20], [1])
    for place, held in enumerate(layer):
        assert torch.equal(cache.text(held, 1, 40), before[place][:, :40])
        view.write(held, noise(1, 2, 20, 32, seed=9))
        assert torch.equal(cache.text(held, 0, 60), before[place])
        assert torch.equal(cache.text(held, 1, 40), before[place][:, :40])


def test_another_models_cache_follows_the_same_table() -> None:
    cache = paged(masked_attention, [20, 5, 0, 0], 16, seed=0)
    other = cache.another()
    assert not other.layers
    table = other.table.data_ptr()
    cache.pages.resize(2, 33)
    updated(other)
    assert cache.table_changes() == []
    assert cache.table.data_ptr() == table
    assert cache.table[2].tolist() == [*cache.pages.tables[2], *[0] * (MAX_LEN // 16 + 1 - 3)]


def test_a_cache_on_another_device_or_stream_has_a_table_of_its_own() -> None:
    cache = paged(masked_attention, [20, 5, 0, 0], 16, seed=0)
    updated(cache)
    other = cache.another(torch.device(DEVICE))
    assert other.table.data_ptr() != cache.table.data_ptr()
    updated(other)  # what slots hold already
    assert other.table.tolist() == cache.table.tolist()
    cache.pages.resize(2, 33)
    updated(other)
    assert other.table_changes() == []
    assert len(cache.table_changes()[0]) == 3, "each follows by itself"
    updated(cache)
    assert other.table.tolist() == cache.table.tolist()
    other.release()
    cache.pages.resize(2, 0)
    assert other.table_changes() == [], "once it is released nothing is noted for it"


def test_memory_for_timing_is_taken_while_there_is_some() -> None:
    cache = paged(masked_attention, [20, 5, 0, 0], 16, seed=0, spare=4)
    cache.commit(4, 48)
    assert [len(table) for table in cache.pages.tables] == [3, 3, 0, 0]


class Raced(dict[int, int]):
    """Changes of a block table that another thread takes over while this one reads them."""

    def values(self) -> ValuesView[int]:
        self.clear()
        return super().values()


def test_changes_of_the_table_are_read_whole_while_a_drafts_thread_takes_them_over() -> None:
    """Micro-batches: target and draft begin their passes at the same time, and share the table."""
    cache = paged(masked_attention, [16, 16, 16, 16], 16, seed=0)
    cache.pages.resize(2, 40)
    wanted = dict(cache.pages.changes)
    cache.pages.changes = Raced(wanted)
    entries, pages = cache.table_changes()
    assert dict(zip(entries.tolist(), pages.tolist(), strict=True)) == wanted
