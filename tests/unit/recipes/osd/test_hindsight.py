"""What a draft would have done with a recorded answer, against whole distributions and against the engine's rule."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.errors import ConfigError
from distillspec.evaluation.positions import measure_positions
from distillspec.models import LanguageModel, initialise_draft
from distillspec.models.draft import truncate_head
from distillspec.recipes.osd.hindsight import Hindsight, look_back, redraw
from distillspec.serving.online.log.records import ACCEPTED, BONUS, REJECTED
from distillspec.types import SamplingPolicy

from .conftest import TOKENS, logged


@pytest.fixture(scope="module")
def draft(target: LanguageModel) -> LanguageModel:
    return initialise_draft(DraftConfig(layers=2), target)


def test_the_true_rate_lies_between_the_bounds_of_a_short_signal(target: LanguageModel, draft: LanguageModel) -> None:
    answer = logged(target, entries=8)
    seen = look_back(draft, answer)
    true = measure_positions(draft, target, answer.sample(), answer.policy).alpha
    assert bool((seen.lower <= true + 2e-3).all())
    assert bool((true <= seen.upper + 2e-3).all())
    assert float((seen.upper - seen.lower).mean()) > 0.02  # eight entries leave something open


@pytest.mark.parametrize("kept", [None, 200])
def test_a_whole_signal_gives_the_true_rates(target: LanguageModel, draft: LanguageModel, kept: int | None) -> None:
    model = (
        draft if kept is None else truncate_head(initialise_draft(DraftConfig(layers=2), target), torch.arange(kept))
    )
    answer = logged(target, entries=target.identity.vocab_size)
    seen = look_back(model, answer)
    true = measure_positions(model, target, answer.sample(), answer.policy)
    torch.testing.assert_close(seen.upper, true.alpha, atol=2e-3, rtol=0)
    torch.testing.assert_close(seen.lower, true.alpha, atol=2e-3, rtol=0)
    torch.testing.assert_close(seen.accepted, true.accepted, atol=5e-3, rtol=0)


def test_outcomes_follow_the_windows_of_an_engine(target: LanguageModel) -> None:
    answer = logged(target, entries=8)
    ones = torch.ones(TOKENS, dtype=torch.float64)
    perfect = redraw(answer, Hindsight(ones, ones, ones, ones < 0), "two", length=3, seed=0)
    assert perfect.outcomes.tolist() == ([ACCEPTED] * 3 + [BONUS]) * (TOKENS // 4)
    assert perfect.draft_tokens.tolist()[:4] == [*answer.response_ids[:3], -1]
    assert perfect.draft_versions == ("two",)
    useless = redraw(answer, Hindsight(ones, ones, 0 * ones, ones < 0), "two", length=3, seed=0)
    assert set(useless.outcomes.tolist()) == {REJECTED}


def test_tokens_stand_as_often_as_they_should_and_the_same_ones_again(target: LanguageModel) -> None:
    answer, shares = logged(target, entries=8), torch.full((TOKENS,), 0.3, dtype=torch.float64)
    seen = Hindsight(shares, shares, shares, shares < 0)
    drawn = [redraw(replace(answer, request_id=f"0/a/{i}"), seen, "two", length=2, seed=0) for i in range(200)]
    tried, accepted = sum(a.tried for a in drawn), sum(a.accepted for a in drawn)
    assert abs(accepted / tried - 0.3) < 4 * (0.3 * 0.7 / tried) ** 0.5
    again = redraw(replace(answer, request_id="0/a/7"), seen, "two", length=2, seed=0)
    assert torch.equal(again.outcomes, drawn[7].outcomes)
    assert not torch.equal(drawn[7].outcomes, drawn[8].outcomes)


def test_another_policy_is_refused(target: LanguageModel, draft: LanguageModel) -> None:
    with pytest.raises(ConfigError, match="temperature 1"):
        look_back(draft, replace(logged(target, 8), policy=SamplingPolicy(temperature=0.7)))


def test_tokens_of_the_tail_stand_less_often_by_its_share(target: LanguageModel, draft: LanguageModel) -> None:
    answer = logged(target, entries=8)
    seen = look_back(draft, answer)
    best = [set(row) for row in answer.signal.ids.tolist()]
    assert seen.in_tail.tolist() == [x not in row for x, row in zip(answer.response_ids, best, strict=True)]
    tail_alone = replace(seen, accepted=seen.in_tail.double())
    drawn = [
        redraw(replace(answer, request_id=f"0/a/{i}"), tail_alone, "two", 1, 0, tail_share=0.25) for i in range(100)
    ]
    tried = sum(int((seen.in_tail & (a.outcomes != BONUS)).sum()) for a in drawn)
    accepted = sum(a.accepted for a in drawn)
    assert abs(accepted / tried - 0.25) < 4 * (0.25 * 0.75 / tried) ** 0.5
