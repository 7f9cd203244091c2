"""Acceptance where a store's token is tried before the draft's: by enumeration, from the log, and from whole models."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.config import DraftConfig
from distillspec.evaluation.positions import measure_positions
from distillspec.evaluation.states import TargetStates
from distillspec.losses import BucketedPair
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft import truncate_head
from distillspec.recipes.osd.beside import NOTHING, alpha_beside, bounds_beside
from distillspec.recipes.osd.hindsight import look_back
from distillspec.signals import TeacherSignal

from .conftest import TOKENS, logged


@pytest.fixture(scope="module")
def draft(target: LanguageModel) -> LanguageModel:
    return truncate_head(initialise_draft(DraftConfig(layers=2), target), torch.arange(200))


@pytest.fixture
def named() -> Tensor:
    """Return a token at each position, none at some, others outside the draft's vocabulary."""
    tokens = torch.randint(0, 250, (TOKENS,), generator=torch.Generator().manual_seed(1))
    tokens[::5] = NOTHING
    return tokens


def accepted_by_enumeration(p: Tensor, q: Tensor, named: int) -> float:
    """Return P(one of both is accepted), by the rules of rejection sampling in turn."""
    first = float(p[named])
    left = p.clone()
    left[named] = 0
    left /= left.sum()
    return first + (1 - first) * float(torch.minimum(left, q).sum())


def test_the_formula_is_that_of_two_rounds_of_rejection() -> None:
    p, q = torch.rand(2, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(-1)
    pair = BucketedPair(p.log()[None], q.log()[None], torch.zeros(1))
    signal = TeacherSignal("topk", torch.arange(11)[None], p[None, :11].log(), p[None, 11])  # the twelfth is the tail
    for token in range(11):
        high, low = bounds_beside(pair, signal, torch.tensor([token]))
        true = accepted_by_enumeration(p, q, token)
        assert float(high) == pytest.approx(true)
        assert float(low) == pytest.approx(true - float(torch.minimum(p[11], (1 - p[token]) * q[11])))


def test_a_whole_signal_gives_the_true_rate(target: LanguageModel, draft: LanguageModel, named: Tensor) -> None:
    answer = logged(target, entries=target.identity.vocab_size)
    true = alpha_beside(draft, target, answer, named, TargetStates(target))
    seen = look_back(draft, answer, named=named)
    torch.testing.assert_close(seen.upper, true, atol=2e-3, rtol=0)
    torch.testing.assert_close(seen.lower, true, atol=2e-3, rtol=0)
    alone = measure_positions(draft, target, answer.sample(), answer.policy).alpha
    nothing = named == NOTHING
    torch.testing.assert_close(true[nothing], alone[nothing], atol=1e-6, rtol=0)
    # One more token is tried. A draft that is surer of it than the target loses a little.
    assert float((true - alone)[~nothing].mean()) > 0
    assert float((true - alone).min()) > -0.01


def test_a_short_signal_bounds_it(target: LanguageModel, draft: LanguageModel, named: Tensor) -> None:
    answer = logged(target, entries=8)
    true = alpha_beside(draft, target, answer, named, TargetStates(target))
    seen = look_back(draft, answer, named=named)
    assert bool((seen.lower <= true + 2e-3).all())
    assert bool((true <= seen.upper + 2e-3).all())
