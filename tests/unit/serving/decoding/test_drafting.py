"""Drafted tokens of rows of all kinds side by side: each follows the distribution it says it was drawn from."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.sampling import policy_probs
from distillspec.serving import SamplingParams
from distillspec.serving.base.requests import Request, SequenceState
from distillspec.serving.decoding.drafting import Choice, Draws, choose
from distillspec.serving.decoding.logits import Columns, Place
from distillspec.serving.decoding.noise import exponentials, hashed_ids, key_tensor, noise_key
from distillspec.serving.decoding.sampling import TokenSampler

CPU = torch.device("cpu")
NUMBERS = count()
KEPT = torch.tensor([3, 8, 20, 21, 25])


def place(params: SamplingParams, *drafted: int) -> Place:
    name = str(next(NUMBERS))
    return Place(SequenceState(name, Request(name, (1,), params), 0, 0, [1, 8, 20], frozenset(), 64), drafted)


def drafted(logits: Tensor, places: list[Place], kept: Tensor = KEPT) -> tuple[Choice, Draws]:
    columns = Columns(30, kept)
    draws = TokenSampler(30, CPU, seed=4).draws(places, 2, columns)
    return choose(logits, draws, 1, hashed_ids(kept)), draws


MIXED: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {},
    {"temperature": 0.7, "top_p": 0.6},
    {"top_k": 2},
    {"min_p": 0.3},
    {"temperature": 0.8, "logit_bias": {8: 2.0}, "repetition_penalty": 1.5, "frequency_penalty": 0.5},
    {"allowed_token_ids": [20, 25, 29]},
]


def test_rows_of_all_kinds_draw_from_their_own_policies() -> None:
    """Five columns are within the prefix that filters look at, so filters are those of `policy_probs`."""
    logits = torch.randn(len(MIXED), len(KEPT), generator=torch.Generator().manual_seed(0))
    changed = logits.clone()
    changed[5] = torch.tensor([0.0, 2.0, 0.0, 0.0, 0.0]) + logits[5]
    seen = changed[5, 1:3]
    changed[5, 1:3] = torch.where(seen > 0, seen / 1.5, seen * 1.5) - 0.5
    changed[6, [0, 1, 3]] = -torch.inf
    choice, draws = drafted(logits, [place(SamplingParams(**own)) for own in MIXED])
    assert choice.probs is not None
    assert draws.keys is None
    assert choice.columns[0] == logits[0].argmax()
    for row, own in list(enumerate(MIXED))[1:]:
        if row != 5:  # biases and penalties are added up before the repetition penalty is known
            wanted = policy_probs(changed[row], SamplingParams(**own).policy)
            torch.testing.assert_close(choice.probs[row], wanted)
    assert choice.probs[5, 1] != torch.softmax(logits[5] / 0.8, -1)[1]


def test_drawn_tokens_follow_what_they_say_they_were_drawn_from() -> None:
    logits = torch.randn(5, generator=torch.Generator().manual_seed(1)).expand(20_000, -1)
    choice, _ = drafted(logits, [place(SamplingParams(top_k=4, temperature=1.3))] * 20_000)
    assert choice.probs is not None
    wanted = choice.probs[0] * 20_000
    counts = choice.columns.bincount(minlength=5)
    assert counts[wanted == 0].sum() == 0
    assert float(((counts - wanted) ** 2 / wanted)[wanted > 0].sum()) < 20  # 3 degrees of freedom


def test_seeded_rows_take_the_noise_of_their_position() -> None:
    params = SamplingParams(seed=6, temperature=0.8)
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(2))
    choice, _ = drafted(logits, [place(params, 25)])
    position = 2 + 1 + 1  # two output tokens, a drafted one, and the second of this draft
    noise = exponentials(key_tensor([noise_key(6, 0, position)]), hashed_ids(KEPT))
    assert choice.columns[0] == (torch.softmax(logits / 0.8, -1) / noise).argmax()


def test_a_wide_nucleus_keeps_its_tail() -> None:
    kept = torch.arange(2000)
    logits = torch.zeros(2, 2000)
    logits[1, :3] = 12.0
    choice, _ = drafted(logits, [place(SamplingParams(top_p=0.9))] * 2, kept)
    assert choice.probs is not None
    assert (choice.probs > 0).sum(-1).tolist() == [2000, 3]


@pytest.mark.parametrize("bad", ["nan", "none allowed"])
def test_rows_that_can_draft_nothing_are_told_apart(bad: str) -> None:
    logits = torch.zeros(3, 5)
    if bad == "nan":
        logits[1, 2] = torch.nan
    places = [place(SamplingParams(allowed_token_ids=[5] if bad != "nan" and row == 1 else None)) for row in range(3)]
    choice, _ = drafted(logits, places)
    assert choice.finite.tolist() == [True, False, True]
    assert choice.probs is not None
    assert bool(torch.isfinite(choice.probs[[0, 2]]).all())


def test_without_drawn_rows_no_distribution_is_kept() -> None:
    choice, draws = drafted(torch.eye(2, 5), [place(SamplingParams(temperature=0.0, logit_bias={21: 5.0}))] * 2)
    assert choice.probs is None
    assert KEPT[choice.columns].tolist() == [21, 21]
    assert draws.kind == (False, False, False, False, False, True, False)
