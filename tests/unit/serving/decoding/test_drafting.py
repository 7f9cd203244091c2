"""Drafted tokens of rows of all kinds side by side: each follows the distribution it says it was drawn from."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from distillspec.sampling import policy_probs
from distillspec.sampling.checks import HOTTEST
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


def drafted(logits: Tensor, places: list[Place], kept: Tensor = KEPT, siblings: int = 1) -> tuple[Choice, Draws]:
    columns = Columns(30, kept)
    draws = TokenSampler(30, CPU, seed=4).draws(places, 2, columns, siblings)
    return choose(logits, draws, 1, hashed_ids(kept), siblings), draws


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
    assert choice.columns[0, 0] == logits[0].argmax()
    for row, own in list(enumerate(MIXED))[1:]:
        if row != 5:  # biases and penalties are added up before the repetition penalty is known
            wanted = policy_probs(changed[row], SamplingParams(**own).policy)
            torch.testing.assert_close(choice.probs[row], wanted)
    assert choice.probs[5, 1] != torch.softmax(logits[5] / 0.8, -1)[1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, HOTTEST])
def test_at_any_temperature_a_banned_token_has_no_probability(temperature: float) -> None:
    """−inf divided by a temperature that is no float32 is NaN, and what is drawn from NaN is judged by NaN."""
    logits = torch.randn(1, len(KEPT), generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=temperature, allowed_token_ids=[8, 25], top_p=0.99)
    choice, _ = drafted(logits, [place(params)], siblings=2)
    assert choice.probs is not None
    assert choice.probs[0, [0, 2, 3]].tolist() == [0.0] * 3
    assert float(choice.probs.sum()) == pytest.approx(1)
    assert {8, 25} >= {int(KEPT[column]) for column in choice.columns[0] if column >= 0}


def test_drawn_tokens_follow_what_they_say_they_were_drawn_from() -> None:
    logits = torch.randn(5, generator=torch.Generator().manual_seed(1)).expand(20_000, -1)
    choice, _ = drafted(logits, [place(SamplingParams(top_k=4, temperature=1.3))] * 20_000)
    assert choice.probs is not None
    wanted = choice.probs[0] * 20_000
    counts = choice.columns[:, 0].bincount(minlength=5)
    assert counts[wanted == 0].sum() == 0
    assert float(((counts - wanted) ** 2 / wanted)[wanted > 0].sum()) < 20  # 3 degrees of freedom


def test_seeded_rows_take_the_noise_of_their_position() -> None:
    params = SamplingParams(seed=6, temperature=0.8)
    logits = torch.randn(1, 5, generator=torch.Generator().manual_seed(2))
    choice, _ = drafted(logits, [place(params, 25)])
    position = 2 + 1 + 1  # two output tokens, a drafted one, and the second of this draft
    noise = exponentials(key_tensor([noise_key(6, 0, position)]), hashed_ids(KEPT))
    assert choice.columns[0, 0] == (torch.softmax(logits / 0.8, -1) / noise).argmax()


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
    assert KEPT[choice.columns].tolist() == [[21], [21]]
    assert draws.kind == (False, False, False, False, False, True, False, False)


def test_siblings_are_drawn_in_turn_from_what_is_left() -> None:
    """The first of p, the second of p without the first, renormalised: the order is that of `torch.multinomial`."""
    rows = 40_000
    logits = torch.tensor([[1.0, 0.5, 0.0, -1.0, -torch.inf]]).expand(rows, -1)
    choice, _ = drafted(logits, [place(SamplingParams())] * rows, siblings=3)
    assert choice.probs is not None
    p = choice.probs[0].double()
    pairs = torch.zeros(5, 5).index_put((choice.columns[:, 0], choice.columns[:, 1]), torch.ones(rows), accumulate=True)
    wanted = p[:, None] * p / (1 - p[:, None]) * (1 - torch.eye(5)) * rows
    assert pairs[wanted == 0].sum() == 0
    assert float(((pairs - wanted) ** 2 / wanted)[wanted > 0].sum()) < 35  # 11 degrees of freedom
    thirds = torch.zeros(5).index_put((choice.columns[:, 2],), torch.ones(rows), accumulate=True)
    assert thirds[3] > thirds[0], "the least probable token is left most often"


def test_siblings_end_where_no_probability_is_left() -> None:
    places = [place(SamplingParams(**own)) for own in ({"top_k": 2}, {}, {"temperature": 0.0}, {"seed": 3})]
    logits = torch.tensor([[4.0, 3.0, 2.0, 1.0, 0.0]]).repeat(4, 1)
    logits[1:, 1:] = -torch.inf
    choice, _ = drafted(logits, places, siblings=3)
    assert sorted(choice.columns[0, :2].tolist()) == [0, 1]
    assert choice.columns[0, 2] == -1
    assert choice.columns[1:3].tolist() == [[0, -1, -1]] * 2
    assert choice.columns[3, 0] == 0
    assert Columns(30, KEPT).ids(choice.columns)[1].tolist() == [3, -1, -1]


def test_greedy_and_seeded_siblings_are_the_best_scores_in_order() -> None:
    logits = torch.randn(2, 5, generator=torch.Generator().manual_seed(2))
    greedy, seeded = place(SamplingParams(temperature=0.0)), place(SamplingParams(seed=6, temperature=0.8), 25)
    choice, _ = drafted(logits, [greedy, seeded], siblings=4)
    noise = exponentials(key_tensor([noise_key(6, 0, 4)]), hashed_ids(KEPT))
    scores = torch.cat([logits[:1], torch.softmax(logits[1:] / 0.8, -1) / noise])
    assert choice.columns.tolist() == scores.topk(4).indices.tolist()


def test_a_seeds_first_token_is_the_same_with_siblings_and_without() -> None:
    logits = torch.randn(64, 5, generator=torch.Generator().manual_seed(5))
    asked = [place(SamplingParams(seed=seed)) for seed in range(64)]
    alone, beside = drafted(logits, asked)[0], drafted(logits, asked, siblings=3)[0]
    assert alone.columns[:, 0].tolist() == beside.columns[:, 0].tolist()
