"""A flat pass gives what passes row by row give: windows, trees and prompts together, in any layout."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.slot_attention import slot_attention_in
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.base.tree import ROOT, TokenTree
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.row_input import RowInput
from distillspec.serving.execution.runner import ModelRunner

MAX_LEN = 200
WIDE = TokenTree.of_parents((7, 8, 9, 10), (ROOT, ROOT, 0, 2))


def row(slot: int, start: int, count: int, wanted: int | None = None, tree: TokenTree | None = None) -> RowInput:
    tokens = [(31 * slot + 7 * start + 3 * place) % 200 + 3 for place in range(count)]
    if tree is not None:
        tokens[1:] = tree.tokens
    return RowInput(slot, start, tokens, count if wanted is None else wanted, tree)


LAYOUTS = {
    "one token each": [row(0, 40, 1), row(1, 9, 1), row(2, 150, 1)],
    "ragged windows": [row(0, 40, 5), row(1, 9, 1), row(2, 150, 3)],
    "windows and prompts": [row(0, 40, 1), row(1, 9, 4), row(2, 0, 30, 1), row(3, 10, 47, 0), row(4, 0, 17, 1)],
    "prompts of one length": [row(1, 0, 20, 1), row(2, 5, 20, 2), row(3, 0, 20, 0)],
    "slots that are no neighbours": [row(0, 40, 2), row(2, 9, 1), row(4, 33, 3), row(3, 7, 1)],
    "trees beside chains": [row(0, 40, 2), row(1, 60, 5, tree=WIDE), row(2, 9, 1), row(3, 0, 21, 1)],
}


def filled(model: LanguageModel) -> SlotCache:
    """Return a cache of five slots, each full of text."""
    cache = SlotCache(5, MAX_LEN)
    for slot in range(5):
        read(model, cache, [row(slot, 0, MAX_LEN)])
    return cache


def copied(cache: SlotCache) -> SlotCache:
    layers = {index: (keys.clone(), values.clone()) for index, (keys, values) in cache.layers.items()}
    return SlotCache(cache.slots, cache.max_len, layers=layers)


@torch.inference_mode()
def read(model: LanguageModel, cache: SlotCache, rows: list[RowInput]) -> Tensor:
    runner = ModelRunner(model, cache)
    with slot_attention_in(model.model):
        return runner.read(rows).clone()


@pytest.mark.numerics
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", ["llama", "gemma3_text"])
def test_a_flat_pass_gives_and_writes_what_passes_row_by_row_do(
    random_model: Callable[..., LanguageModel], kind: str, layout: str
) -> None:
    model = random_model(kind, torch.float64)
    rows = LAYOUTS[layout]
    start = filled(model)
    together, apart = copied(start), copied(start)
    found = read(model, together, rows)
    wanted = torch.cat([read(model, apart, [one]) for one in rows])
    assert found.shape == wanted.shape == (sum(one.wanted for one in rows), model.head.weight.shape[1])
    torch.testing.assert_close(found, wanted, atol=1e-10, rtol=1e-10)
    for index, layer in together.layers.items():
        for held, other in zip(layer, apart.layers[index], strict=True):
            torch.testing.assert_close(held[:, :, :MAX_LEN], other[:, :, :MAX_LEN], atol=1e-10, rtol=1e-10)


def test_nothing_but_attention_computes_padding() -> None:
    batch = FlatBatch.of(SlotCache(5, MAX_LEN), LAYOUTS["windows and prompts"], torch.device("cpu"))
    assert batch.tokens.shape == (1, 1 + 4 + 30 + 47 + 17)
    assert [group.view.places.shape for group in batch.view.groups] == [(2, 4), (1, 30), (1, 47), (1, 17)]
    assert batch.wanted.tolist() == [0, 1, 2, 3, 4, 34, 98]


def test_neighbours_are_read_from_the_cache_without_a_copy() -> None:
    batch = FlatBatch.of(SlotCache(5, MAX_LEN), LAYOUTS["slots that are no neighbours"], torch.device("cpu"))
    groups = batch.view.groups
    assert [(group.view.first, len(group.view.slots)) for group in groups] == [(0, 1), (2, 1), (4, 1), (3, 1)]
    held = torch.zeros(5, 2, MAX_LEN + 1, 4)
    assert all(group.view.read(held).data_ptr() == held[group.view.first].data_ptr() for group in groups)


def test_the_next_pass_has_one_token_in_each_row() -> None:
    view = FlatBatch.of(SlotCache(5, MAX_LEN), LAYOUTS["slots that are no neighbours"], torch.device("cpu")).view
    following = view.following(torch.tensor([42, 10, MAX_LEN, 8]), 64)
    assert following.slots.tolist() == [0, 2, 4, 3]
    assert following.places.tolist() == [42, 10, MAX_LEN, 8]
    assert following.positions.tolist() == [[42, 10, MAX_LEN - 1, 8]]
    assert [(group.start, group.count, group.view.places.tolist()) for group in following.groups] == [
        (0, 1, [[42]]),
        (1, 1, [[10]]),
        (2, 1, [[MAX_LEN]]),
        (3, 1, [[8]]),
    ]
