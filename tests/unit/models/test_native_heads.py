"""Heads and blocks in one call of C++: the recursion written out, in each dtype and packing, and what is not taken."""

from __future__ import annotations

from itertools import product

import numpy
import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel
from distillspec.models import native_heads as module
from distillspec.models.draft_steps import DraftSteps, DrawParameters, StatesBefore, Unread
from distillspec.models.few_queries import why_not
from distillspec.models.native_heads import NativeHeads
from distillspec.models.native_layers import NativeLayers
from distillspec.models.native_rows import NativeRows
from distillspec.models.slot_cache import SlotCache
from distillspec.native.vector_kernel import LARGEST, vector_kernel

from .middle_llama import llama
from .state_drafts import logits_behind, state_draft
from .test_draft_steps import chains, round_to_codes

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs"),
]
DRAFTS = {
    "medusa": DraftConfig(kind="medusa"),
    "medusa on two states": DraftConfig(kind="medusa", feature_ids=[1, 3]),
    "hydra": DraftConfig(kind="medusa", sequential=True, feature_ids=[1, 3]),
    "block": DraftConfig(kind="block"),
    "block without a Markov head": DraftConfig(kind="block", markov=0),
    "block of one token": DraftConfig(kind="block", positions=1),
}
CLOSE = {torch.float32: 5e-3, torch.bfloat16: 0.06}  # of a probability, by rounded weights and activations


def steps_of(draft: LanguageModel, *, eight: bool) -> DraftSteps | None:
    return DraftSteps.of(draft, NativeLayers.of(draft, exact=False, eight=eight), eight=eight)


@torch.inference_mode()
@pytest.mark.parametrize(("dtype", "eight"), list(product(CLOSE, (False, True))))
@pytest.mark.parametrize("name", DRAFTS)
def test_distributions_are_those_of_the_recursion(name: str, dtype: torch.dtype, eight: bool) -> None:
    target = llama(dtype)
    draft = state_draft(DRAFTS[name], target, noise=0.05)
    codes = vector_kernel().codes(dtype)
    if eight and codes in LARGEST:
        round_to_codes(draft, codes)
    steps, depth = steps_of(draft, eight=eight), draft.most_positions or 0
    assert steps is not None
    generator = torch.Generator().manual_seed(3)
    assert draft.state_input is not None
    width = len(draft.state_ids) * draft.state_input.target_width
    text, states = [7, 200, 12], torch.randn(3, width, generator=generator).to(dtype)
    read = text if draft.attends else text[-1:]  # heads have no use for what came before
    masks = [-k for k in range(1, depth)] if draft.drafts_block else []
    start = len(text) - len(read)
    row = states.stride(0) * states.element_size()
    before = [0, *(states.data_ptr() + place * row for place in range(len(text) - 1)), *[0] * len(masks)][start:]
    columns = list(range(0, width, draft.state_input.target_width))
    unread = Unread(
        numpy.array([*read, *masks]),
        NativeRows.chains([0], [start], [len(read) + len(masks)]),
        StatesBefore(numpy.array(before), columns),
    )
    policy, uniforms = torch.tensor([[1.0, 0, 1, 0]], dtype=torch.float64), torch.rand(1, depth, 1, dtype=torch.float64)
    plain = DrawParameters(policy, uniforms)
    found = steps.run(SlotCache(1, 32), unread, chains(1, depth), plain)
    assert found.probs is not None
    assert bool(found.finite.all())
    for probs, logits in zip(found.probs, logits_behind(draft, states, text, found.ids.tolist()), strict=True):
        torch.testing.assert_close(probs, logits.float().softmax(-1), atol=CLOSE[dtype], rtol=0)


def test_drafts_that_attend_and_other_dtypes_are_not_taken() -> None:
    target = llama()
    assert NativeHeads.of(state_draft("hydra", target)) is not None
    assert NativeHeads.of(state_draft("eagle", target)) is None
    assert NativeHeads.of(state_draft("hydra", llama(torch.float64))) is None


def test_heads_without_room_for_copies_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "fit_memory", lambda model, weights: sum(map(torch.numel, weights)) == 0)
    assert NativeHeads.of(state_draft("hydra", llama())) is None
