"""Figures of answers against the target's distribution."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from distillspec.evaluation.answer_quality import Answer, correct, last_number, likelihood, quality, uneven
from distillspec.models import LanguageModel
from distillspec.sampling import policy_probs
from distillspec.types import Prompt, SamplingPolicy

WARM = SamplingPolicy(0.8, 0, 0.95, 0.0)


def answer_of(tokens: list[int], text: str = "", response: str | None = None) -> Answer:
    return Answer(Prompt("a", (5, 9, 11), response=response), tuple(tokens), text)


def test_likelihood_is_the_targets(random_model: Callable[..., LanguageModel]) -> None:
    target = random_model("llama", torch.float64)
    answer = answer_of([7, 8, 7])
    score = likelihood(target, answer, SamplingPolicy(1.0, 0, 1.0, 0.0), torch.Generator().manual_seed(0))
    surprise, entropy, best = 0.0, 0.0, 0
    for end, token in enumerate(answer.token_ids):
        with torch.no_grad():
            logits = target.logits(torch.tensor([[5, 9, 11, *answer.token_ids[:end]]]))[0, -1]
        p = torch.softmax(logits.double(), -1)
        surprise -= math.log(float(p[token]))
        entropy -= float((p * p.log()).sum())
        best += int(p.argmax()) == token
        above = float(p[p > p[token]].sum())
        assert above <= float(score.quantiles[end]) <= above + float(p[token])
    assert (score.surprise, score.entropy) == (pytest.approx(surprise, rel=1e-5), pytest.approx(entropy, rel=1e-5))
    assert score.best == best


def test_the_targets_own_tokens_are_even_and_probable_ones_are_not(
    random_model: Callable[..., LanguageModel],
) -> None:
    target = random_model("llama", torch.float64)
    chance = torch.Generator().manual_seed(3)
    own, likely = [], []
    for _ in range(12):
        tokens: dict[str, list[int]] = {"own": [], "likely": []}
        for kind, made in tokens.items():
            for _ in range(40):
                with torch.no_grad():
                    logits = target.logits(torch.tensor([[5, 9, 11, *made]]))[0, -1:].float()
                p = policy_probs(logits, WARM)[0]
                two = torch.multinomial(p, 2, replacement=True, generator=chance).tolist()
                made.append(two[0] if kind == "own" else max(two, key=lambda token: float(p[token])))
        own.append(answer_of(tokens["own"]))
        likely.append(answer_of(tokens["likely"]))
    found = {}
    for name, answers in {"own": own, "likely": likely}.items():
        scores = [likelihood(target, answer, WARM, chance) for answer in answers]
        found[name] = quality(answers, scores, seed=0)
    assert found["own"].surprise_over_entropy.low < 0 < found["own"].surprise_over_entropy.high
    assert found["own"].distance < 2 * found["own"].distance_by_chance
    assert found["likely"].surprise_over_entropy.high < 0
    assert found["likely"].distance > 3 * found["likely"].distance_by_chance
    assert found["own"].tokens == 480


@pytest.mark.parametrize(
    ("text", "number"),
    [("#### 1,200", 1200.0), ("so 3.5 or -4", -4.0), ("none", None), ("It costs $12.", 12.0)],
)
def test_the_last_number(text: str, number: float | None) -> None:
    assert last_number(text) == number


def test_answers_are_right_by_their_last_number() -> None:
    right = answer_of([1, 2, 1, 2], "5 + 7 = 12", "…\n#### 12")
    wrong = answer_of([3, 4], "11", "#### 12")
    assert correct(answer_of([1], "12")) is None
    assert [correct(right), correct(wrong)] == [True, False]


def test_uneven_is_a_distance() -> None:
    assert uneven(torch.linspace(0.025, 0.975, 20).numpy()) == pytest.approx(0)
    assert uneven(torch.full((10,), 0.5).numpy()) == pytest.approx(0.95)


def test_tokens_that_a_filter_rules_out_are_counted_apart(random_model: Callable[..., LanguageModel]) -> None:
    """An engine's pass rounds otherwise, so a token at the edge may lie outside: −log 0 would be infinite."""
    target = random_model("llama", torch.float64)
    narrow = SamplingPolicy(1.0, 1, 1.0, 0.0)
    with torch.no_grad():
        best = int(target.logits(torch.tensor([[5, 9, 11]]))[0, -1].argmax())
    answers = [answer_of([best]), answer_of([(best + 1) % 20])]
    scores = [likelihood(target, answer, narrow, torch.Generator().manual_seed(0)) for answer in answers]
    assert [score.ruled_out for score in scores] == [0, 1]
    found = quality(answers, scores, seed=0)
    assert found.ruled_out == 0.5
    assert found.perplexity == pytest.approx(1.0)
    assert math.isfinite(found.surprise_over_entropy.mean)


def test_places_are_even_where_tokens_are_equally_probable(
    random_model: Callable[..., LanguageModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, chance = random_model("llama", torch.float64), torch.Generator().manual_seed(0)
    half = torch.zeros(20)
    half[10:] = -1.0  # ten tokens of .073 each, then ten of .027
    monkeypatch.setattr(type(target), "logits", lambda self, ids: half.expand(*ids.shape, -1))
    tokens = torch.multinomial(half.softmax(-1), 2000, replacement=True, generator=chance).tolist()
    score = likelihood(target, answer_of(tokens), SamplingPolicy(), chance)
    found = quality([answer_of(tokens)], [score], seed=0)
    assert found.distance < 2 * found.distance_by_chance
