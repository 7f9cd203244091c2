"""Masks that see each other: what training lets them see is what serving does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.models import LanguageModel
from distillspec.models.both_ways import anchors_of
from distillspec.models.features import read_states
from distillspec.models.slot_cache import SlotCache
from distillspec.models.unrolling import unrolled
from distillspec.serving.execution.flat_batch import FlatBatch
from distillspec.serving.execution.row_input import RowInput

from .state_drafts import state_draft

COUNT, MASKS = 6, 3  # tokens of the text, and masks behind it
TEXT = [(11 * place) % 200 + 3 for place in range(COUNT + MASKS)]


def seen_in_serving() -> Tensor:
    """Return bool `[MASKS, COUNT + MASKS]`: which text and masks each mask sees."""
    row = RowInput(1, 0, [*TEXT[:COUNT], *(-1 - k for k in range(MASKS))], 1 + MASKS, mutual=MASKS)
    (group,) = FlatBatch.of(SlotCache(2, 64), [row], torch.device("cpu")).view.groups
    seen = group.view.mask(None, 1, torch.float64)[0, 0] == 0
    assert torch.equal(seen[:COUNT, :COUNT], torch.ones(COUNT, COUNT, dtype=torch.bool).tril())
    assert not seen[:COUNT, COUNT:].any(), "the text sees no mask"
    return seen[COUNT:, : COUNT + MASKS]


def test_the_mask_of_training_is_that_of_serving(
    random_model: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = random_model("llama", torch.float64)
    draft = state_draft("block both ways", target)
    passed: list[Tensor] = []
    last_states = LanguageModel.last_states

    def noted(model: LanguageModel, ids: Tensor, *given: Any, **named: Any) -> Tensor:
        if (ids < 0).any():
            passed.append(named["attention_mask"][0, 0] == 0)
        return last_states(model, ids, *given, **named)

    monkeypatch.setattr(LanguageModel, "last_states", noted)
    read = torch.tensor([TEXT]), torch.arange(len(TEXT))[None]
    wanted = [torch.tensor([COUNT - 1 + position]) for position in range(1 + MASKS)]
    with torch.no_grad():
        unrolled(draft, *read, read_states(target, *read, draft.state_ids), wanted)
    (seen,) = passed
    newest = COUNT - 1  # read last: of the others there are keys alone
    order = [*(place for place in range(len(TEXT)) if place != newest), newest]
    text = seen[:, [order.index(place) for place in range(len(TEXT))]]
    assert not text[:, COUNT:].any(), "what follows in the text is not known yet"
    assert torch.equal(torch.cat([text[:, :COUNT], seen[:, len(TEXT) :]], 1), seen_in_serving())
    assert bool(seen_in_serving().all())


def test_a_block_begins_in_its_own_sequence() -> None:
    places = torch.tensor([[0, 1, 2, 0, 1]])
    tokens = torch.tensor([2, 3, 4])
    assert [own.tolist() for own in anchors_of(places, [tokens] * 3)] == [[2, 3, 4], [1, 3, 3], [0, 3, 3]]
