"""Scores of drafts on held-out answers."""

from __future__ import annotations

import pytest
import torch

from distillspec.evaluation import TargetStates
from distillspec.models import LanguageModel
from distillspec.serving.online.gate.shadow import EvaluationSample, ServedStates, Shadow

from ...conftest import MakeEngine
from ..conftest import Answer


@pytest.mark.numerics
def test_the_served_targets_states_are_its_own(
    target: LanguageModel, draft: LanguageModel, make_engine: MakeEngine, answer: Answer
) -> None:
    sample = answer("a").sample()
    plain = TargetStates(target).hidden(sample)
    make_engine(draft)  # takes the target over
    torch.testing.assert_close(ServedStates(target).hidden(sample), plain, atol=1e-5, rtol=1e-5)


def test_a_sample_is_scored_once(target: LanguageModel, small_draft: LanguageModel, answer: Answer) -> None:
    works = []

    def run(work):  # type: ignore[no-untyped-def]
        works.append(work)
        return work()

    shadow = Shadow(target, TargetStates(target), 2, run)
    samples = [EvaluationSample(a.sample(), a.policy) for a in (answer("a"), answer("b"))]
    first = shadow.scores(small_draft, samples)
    assert shadow.scores(small_draft, samples) == first
    assert len(works) == 2
    assert shadow.kept == (2, 2)
    shadow.forget()
    assert shadow.kept == (0, 0)


def test_answers_to_one_request_have_one_score(
    target: LanguageModel, small_draft: LanguageModel, answer: Answer
) -> None:
    shadow = Shadow(target, TargetStates(target), 2)
    answers = [answer(f"r0-{j}", request_id="r0", index=j) for j in range(4)]
    samples = [EvaluationSample(a.sample(), a.policy, a.request_id) for a in answers]
    (whole,) = shadow.by_request(small_draft, samples)
    each = shadow.scores(small_draft, samples)
    assert whole.positions == sum(score.positions for score in each) == 80
    assert whole.alpha == pytest.approx(sum(score.alpha for score in each))
    assert whole.tokens == tuple(map(sum, zip(*[score.tokens for score in each], strict=True)))
