"""Trees of a draft in one call. `test_call_drafting` compares them with those that grow level by level."""

from __future__ import annotations

from functools import cache

import numpy
import pytest
import torch
from torch import nn

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft_steps import DraftSteps, Readers, Unread
from distillspec.models.few_queries import why_not
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.slot_cache import SlotCache

from .state_drafts import state_draft
from .test_native_layers import llama, of_codes

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs"),
]
KINDS = ("tokens", "truncated", "eagle", "features", "medusa", "truncated hydra", "truncated block")


@cache
def draft_of(kind: str, dtype: torch.dtype) -> tuple[LanguageModel, LanguageModel]:
    """Return a target and a draft of a kind, whose weights 8 bits hold. Made once: leave them as they are."""
    target = llama(dtype)
    kept = torch.arange(3, 259, 2) if kind.startswith("truncated") else None
    if kind in ("tokens", "truncated"):
        draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=kept)
        draft.model.to(dtype)
    else:
        draft = state_draft(kind.removeprefix("truncated "), target, kept, noise=0.05)
    round_to_codes(draft, torch.int8)
    return target, draft


@torch.no_grad()
def round_to_codes(draft: LanguageModel, codes: torch.dtype) -> None:
    """Let the codes of so many bits hold a draft's weights."""
    for parameter in draft.model.parameters():
        parameter.copy_(parameter.bfloat16())
    for part in (*draft.model.modules(), draft.head):
        if hasattr(part, "weight") and part.weight.ndim == 2 and not isinstance(part, nn.Embedding):
            part.weight.copy_(of_codes(part.weight, codes))


def chains(rows: int, depth: int) -> Readers:
    """Return the readers of a chain behind each text."""
    numbers = []
    for level in range(depth):
        for row in range(rows):
            first = row * depth + level
            above = (first - 1, (level - 1) * rows + row) if level else (-1, -1)
            numbers.append((row, *above, first, 1, level, (1 << level) - 1))
    return Readers(numpy.arange(depth + 1) * rows, numpy.array(numbers), rows * depth)


@torch.inference_mode()
def test_rows_at_the_contexts_end_are_drafted_beside_others() -> None:
    _, draft = draft_of("tokens", torch.float32)
    steps = DraftSteps.of(draft, NativeLayers.of(draft, exact=False))
    assert steps is not None
    unread = Unread(numpy.array([5, 6, 9]), NativeRows.chains([0, 1], [10, 2], [2, 1]), None)
    near, far = (steps.run(SlotCache(2, end), unread, chains(2, 3), None) for end in (12, 40))
    assert torch.equal(near.ids[3:], far.ids[3:])
    assert bool(near.finite.all())


@torch.inference_mode()
def test_scaled_states_are_left_to_others_where_small_weights_would_vanish() -> None:
    """float16, and codes with a step a row, round a column of 2^-12 beside others to nothing."""
    target = llama(torch.float32)
    for dtype in (torch.float32, torch.bfloat16):
        draft = state_draft("scaled eagle", target)
        draft.model.to(dtype)
        for eight in (False, True):
            native = NativeLayers.of(draft, exact=False, eight=eight)
            assert native is not None
            exact = native.kind.weights == torch.bfloat16
            assert (DraftSteps.of(draft, native) is not None) == exact


def test_normed_states_are_left_to_others() -> None:
    """The kernel fuses states by one product."""
    target = llama(torch.float32)
    plain, normed = (state_draft(kind, target) for kind in ("eagle", "normed eagle"))
    assert DraftSteps.of(plain, NativeLayers.of(plain, exact=False)) is not None
    native = NativeLayers.of(normed, exact=False)
    assert native is not None
    assert DraftSteps.of(normed, native) is None


@torch.inference_mode()
def test_nan_is_told_and_stays_in_its_row() -> None:
    _, draft = draft_of.__wrapped__("tokens", torch.float32)
    native = NativeLayers.of(draft, exact=False)
    steps = DraftSteps.of(draft, native)
    assert steps is not None
    args = Unread(numpy.array([5, 7]), NativeRows.chains([0, 1], [0, 0], [1, 1]), None), chains(2, 2), None
    wanted = steps.run(SlotCache(2, 24), *args)
    with torch.no_grad():
        draft.model.get_input_embeddings().weight[7] = torch.nan
    found = steps.run(SlotCache(2, 24), *args)
    assert found.finite.tolist() == [True, False] * 2
    assert torch.equal(found.ids[:2], wanted.ids[:2])


def test_a_markov_head_that_fills_no_vector_is_left_to_the_loop() -> None:
    model = llama()
    native = NativeLayers.of(model)
    assert DraftSteps.of(model, native) is not None
    assert DraftSteps.of(model, None) is None
    narrow = initialise_draft(DraftConfig(kind="block", markov=5), model)
    assert DraftSteps.of(narrow, NativeLayers.of(narrow, exact=False)) is None
