"""A draft's score from the log is the score that the target's whole distributions give, without bias."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from distillspec.config import DraftConfig
from distillspec.evaluation import TargetStates
from distillspec.evaluation.positions import measure_positions
from distillspec.models import LanguageModel, initialise_draft
from distillspec.recording import top_signal
from distillspec.sampling import draw, policy_probs
from distillspec.serving.online.judging.logged_score import logged_score, logged_target
from distillspec.serving.online.judging.score import Score
from distillspec.serving.online.log.records import LoggedAnswer
from distillspec.serving.online.log.signal import policy_figures
from distillspec.signals import TeacherSignal
from distillspec.types import SamplingPolicy

from ..conftest import Answer

POLICIES = {
    "plain": SamplingPolicy(),
    "cooler": SamplingPolicy(temperature=0.7),
    "hotter": SamplingPolicy(temperature=1.3),
    "greedy": SamplingPolicy(temperature=0.0),
    "top-k": SamplingPolicy(temperature=0.8, top_k=12),
    "top-p": SamplingPolicy(temperature=0.6, top_p=0.5),
    "min-p": SamplingPolicy(temperature=0.5, min_p=0.3),
}
LONGEST = 3


def of_text(logged: LoggedAnswer, logits: torch.Tensor, text: list[int]) -> LoggedAnswer:
    """Log another text with these logits, as the tap does."""
    signal = top_signal(logits, 64)
    figures = policy_figures(logits, signal, text, [logged.policy.temperature] * len(text))
    return replace(
        logged,
        response_ids=tuple(text),
        signal=TeacherSignal("topk", signal.ids, signal.logprobs, signal.tail),
        policy_logprobs=figures[:, 0],
        policy_log_z=figures[:, 1],
    )


def written(target: LanguageModel, answer: Answer, name: str, policy: SamplingPolicy, tokens: int) -> LoggedAnswer:
    """Let the target write an answer under a policy, and log it as the tap does."""
    drawn = answer(name, tokens=tokens)
    ids = list(drawn.prompt_ids)
    chance = torch.Generator().manual_seed(sum(name.encode()))
    rows = []
    with torch.no_grad():
        for _ in range(tokens):
            logits = target.logits(torch.tensor([ids]))[0, -1:]
            rows.append(logits)
            uniform = torch.rand(1, generator=chance, dtype=torch.float64)
            ids.append(int(draw(policy_probs(logits, policy), uniform)[0]))
    return of_text(replace(drawn, policy=policy), torch.cat(rows), ids[len(drawn.prompt_ids) :])


@pytest.fixture(params=["tokens", "states"])
def draft(request: pytest.FixtureRequest, target: LanguageModel) -> LanguageModel:
    kind = DraftConfig(layers=2) if request.param == "tokens" else DraftConfig(kind="eagle")
    return initialise_draft(kind, target)


@pytest.mark.parametrize("name", POLICIES)
def test_acceptance_is_right_on_average_over_all_tokens(
    name: str, target: LanguageModel, draft: LanguageModel, answer: Answer
) -> None:
    """By enumeration: each token that the policy may emit, weighted by its probability."""
    policy, states = POLICIES[name], TargetStates(target)
    drawn = replace(answer("one"), policy=policy)
    with torch.no_grad():
        logits = target.logits(torch.tensor([drawn.prompt_ids]))[0, -1:]
    probs = policy_probs(logits, policy)[0]
    found = 0.0
    for token in probs.nonzero()[:, 0].tolist():
        logged = of_text(drawn, logits, [token])
        score = logged_score(draft, logged, states, 1)
        assert score.positions == 1
        found += float(probs[token]) * score.alpha
    exact = measure_positions(draft, target, logged.sample(), policy, states=states)
    assert found == pytest.approx(float(exact.alpha[0]), abs=2e-3)  # the log has float16


@pytest.mark.parametrize("name", POLICIES)
def test_blocks_are_those_that_the_target_would_count(
    name: str, target: LanguageModel, draft: LanguageModel, answer: Answer
) -> None:
    """They rest on w = min(1, q/p) at every token alone."""
    policy, states = POLICIES[name], TargetStates(target)
    for number in range(3):
        logged = written(target, answer, f"{name}{number}", policy, 30)
        found = logged_score(draft, logged, states, LONGEST)
        exact = measure_positions(draft, target, logged.sample(), policy, states=states, speculation_length=LONGEST)
        wanted = Score.of(exact, logged.finished, LONGEST, len(exact))
        known = int(logged_target(logged).known.sum())
        assert found.positions == known >= 20, "few positions are left open"
        if known == len(exact):
            assert found.blocks == pytest.approx(wanted.blocks, rel=5e-3)


def test_what_the_log_does_not_decide_counts_for_nobody(
    target: LanguageModel, small_draft: LanguageModel, answer: Answer
) -> None:
    logged = written(target, answer, "a", SamplingPolicy(), 20)
    hidden = torch.arange(20) % 2 == 0
    half = replace(logged, policy_logprobs=logged.policy_logprobs.masked_fill(hidden, torch.nan))
    whole, found = (logged_score(small_draft, each, None, LONGEST) for each in (logged, half))
    assert (whole.positions, found.positions) == (20, 10)
    assert 0 < found.alpha < whole.alpha
    assert found.tokens[0] < whole.tokens[0] or found.blocks[0] > whole.blocks[0]
    wide = replace(logged, policy=SamplingPolicy(top_p=0.999))  # reaches beyond the 64 best of nearly equal ones
    assert logged_score(small_draft, wide, None, LONGEST).positions < 20
    none = logged_score(small_draft, replace(logged, policy_logprobs=torch.full((20,), torch.nan)), None, LONGEST)
    assert (none.positions, none.alpha) == (0, 0.0)
