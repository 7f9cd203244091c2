"""Steps of a draft loop in one call: the tokens and distributions of the loop that goes pass by pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy
import pytest
import torch
from torch import nn

from distillspec.config import DraftConfig
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft_steps import DraftSteps, Unread
from distillspec.models.few_queries import why_not
from distillspec.models.few_rows import FewRows
from distillspec.models.few_tokens import FewTokens
from distillspec.models.slot_cache import SlotCache
from distillspec.serving.decoding.drafting import Draws
from distillspec.serving.decoding.logits import Columns
from distillspec.serving.execution.flat_batch import RowInput
from distillspec.serving.execution.prepared import PreparedModel
from distillspec.serving.execution.runner import ModelRunner
from distillspec.serving.execution.state_runner import StateRunner
from distillspec.serving.proposers.draft_loop import DraftLoop, Drafts

from .state_drafts import state_draft
from .test_few_tokens import llama, of_codes

pytestmark = [
    pytest.mark.skipif(why_not() is not None, reason=f"no kernel here: {why_not()}"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="for CPUs"),
]
KINDS = ("tokens", "truncated", "eagle", "features")
ROWS = [RowInput(0, 0, [5, 6, 7]), RowInput(1, 0, [9]), RowInput(3, 0, [11, 12])]


def draft_of(kind: str, dtype: torch.dtype) -> tuple[LanguageModel, LanguageModel]:
    """Return a target and a draft of a kind, whose weights 8 bits hold."""
    target = llama(dtype)
    if kind in ("tokens", "truncated"):
        kept = torch.arange(3, 259, 2) if kind == "truncated" else None
        draft = initialise_draft(DraftConfig(layers=2), target, kept_ids=kept)
        draft.model.to(dtype)
    else:
        draft = state_draft(kind, target, noise=0.05)
    with torch.no_grad():
        for parameter in draft.model.parameters():
            parameter.copy_(parameter.bfloat16())
        for part in (*draft.model.modules(), draft.head):
            if hasattr(part, "weight") and part.weight.ndim == 2 and not isinstance(part, nn.Embedding):
                part.weight.copy_(of_codes(part.weight, torch.int8))
    return target, draft


@torch.inference_mode()
def drafted(
    kind: str, widths: tuple[int, ...], draws: Draws, in_one_call: bool, rows: Sequence[RowInput] = ROWS, end: int = 64
) -> tuple[Drafts, int]:
    """Draft behind some rows. Return the drafts, and how many passes were counted."""
    target, draft = draft_of(kind, torch.float32)
    prepared = PreparedModel(draft, pack_weights=True, compile=False, exact=False)
    assert prepared.steps is not None
    if not in_one_call:
        prepared.steps = None
    cache = SlotCache(4, end, state_ids=draft.state_ids)
    runner = ModelRunner(draft, cache.another(), prepared)
    if draft.state_input is not None:
        states = cache.kept_states(draft.head.weight, 128)
        states.copy_(torch.randn(states.shape, generator=torch.Generator().manual_seed(1)))
        runner = StateRunner(draft, cache.another(), cache, prepared)
    loop = DraftLoop(runner, Columns(target.identity.vocab_size, draft.kept_ids), None)
    found = loop.run(rows, widths, draws)
    prepared.restore()
    return found, runner.passes


def draws_of(rows: int, widths: tuple[int, ...], temperatures: list[float]) -> Draws:
    uniforms = torch.rand(
        rows, len(widths), max(widths), generator=torch.Generator().manual_seed(3), dtype=torch.float64
    )
    greedy = torch.tensor([t == 0 for t in temperatures])
    return Draws(torch.tensor(temperatures), uniforms, greedy=greedy if bool(greedy.any()) else None)


@pytest.mark.parametrize("widths", [(1, 1, 1, 1), (2, 3, 1)])
@pytest.mark.parametrize("temperatures", [[], [1.0, 0.7, 2.0], [1.0, 0.0, 0.5]], ids=["greedy", "drawn", "both"])
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_distributions_are_those_of_the_loop(
    kind: str, temperatures: list[float], widths: tuple[int, ...]
) -> None:
    draws = draws_of(3, widths, temperatures) if temperatures else Draws()
    (wanted, passes), (found, counted) = (drafted(kind, widths, draws, once) for once in (False, True))
    assert counted == passes
    assert torch.equal(found.ids, wanted.ids)
    assert torch.equal(found.finite, wanted.finite)
    assert (found.probs is None) == (wanted.probs is None) == (not temperatures)
    if found.probs is not None and wanted.probs is not None:
        torch.testing.assert_close(found.probs, wanted.probs, atol=1e-5, rtol=1e-3)
        sums = found.probs.sum(-1)
        torch.testing.assert_close(sums, torch.ones_like(sums))


def test_siblings_end_where_no_probability_is_left() -> None:
    """At almost no temperature the best token has all of it."""
    draws = draws_of(3, (1, 3), [1e-4] * 3)
    found, _ = drafted("tokens", (1, 3), draws, in_one_call=True)
    assert bool((found.ids[:, 1] >= 0).all())
    assert bool((found.ids[:, 2:] == -1).all())


def test_rows_at_the_contexts_end_are_drafted_beside_others() -> None:
    rows = [RowInput(0, 10, [5, 6]), RowInput(1, 2, [9])]
    both = [drafted("tokens", (1, 1, 1), Draws(), once, rows, end=12)[0] for once in (False, True)]
    assert torch.equal(both[0].ids[1], both[1].ids[1])
    assert bool(both[1].finite.all())


@torch.inference_mode()
def test_nan_is_told_and_stays_in_its_row() -> None:
    _, draft = draft_of("tokens", torch.float32)
    few = FewTokens.of(draft, exact=False)
    steps = DraftSteps.of(draft, few)
    assert steps is not None
    args = Unread(numpy.array([5, 7]), FewRows.chains([0, 1], [0, 0], [1, 1]), None), (1, 1), None
    wanted = steps.run(SlotCache(2, 24), *args)
    with torch.no_grad():
        draft.model.get_input_embeddings().weight[7] = torch.nan
    found = steps.run(SlotCache(2, 24), *args)
    assert found.finite.tolist() == [[True, True], [False, False]]
    assert torch.equal(found.ids[0], wanted.ids[0])


def test_other_heads_are_left_to_the_loop() -> None:
    model = llama()
    few = FewTokens.of(model)
    assert DraftSteps.of(model, few) is not None
    assert DraftSteps.of(model, None) is None
    block = state_draft("block", model)
    assert DraftSteps.of(block, FewTokens.of(block, exact=False)) is None
