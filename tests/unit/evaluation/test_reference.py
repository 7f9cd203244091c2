"""The reference decoder: equal to plain decoding when greedy, the target's distribution when sampling."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable

import pytest
import torch

from distillspec.evaluation import plain_generate, speculative_generate
from distillspec.evaluation.cached import CachedModel
from distillspec.models import LanguageModel
from distillspec.sampling import NonFiniteLogits
from distillspec.types import SamplingPolicy

GREEDY, SAMPLED = SamplingPolicy(0.0), SamplingPolicy()


def with_nan(model: LanguageModel) -> LanguageModel:
    broken = copy.deepcopy(model)
    broken.model.get_output_embeddings().weight.data[7] = float("nan")
    return broken


def test_plain_greedy_equals_transformers(target: LanguageModel, prompts: list[tuple[int, ...]]) -> None:
    ids = torch.tensor([prompts[0]])
    theirs = target.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=30,
        suppress_tokens=[259, 260, 261, 262, 263],
    )
    ours = plain_generate(target, prompts[0], GREEDY, 30)
    assert ours.token_ids == tuple(theirs[0, ids.shape[1] :].tolist())


@pytest.mark.parametrize("gamma", [0, 1, 4, 7])
@pytest.mark.parametrize("which", ["draft", "truncated_draft", "target"])
def test_greedy_equals_plain_decoding(
    which: str,
    gamma: int,
    target: LanguageModel,
    prompts: list[tuple[int, ...]],
    request: pytest.FixtureRequest,
) -> None:
    draft = request.getfixturevalue(which)
    for ids in prompts[:3]:
        plain = plain_generate(target, ids, GREEDY, 25)
        fast = speculative_generate(draft, target, ids, GREEDY, gamma, 25)
        assert fast.token_ids == plain.token_ids
        assert fast.finished == plain.finished
        assert sum(fast.accepted_per_position) == fast.accepted <= fast.proposed
        assert len(fast.token_ids) == fast.accepted + fast.steps  # no stop token among the accepted here
        if which == "target":
            assert fast.accepted == fast.proposed
            assert fast.steps == -(-len(fast.token_ids) // (gamma + 1))


@pytest.mark.parametrize("policy", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("max_new_tokens", [1, 2, 3])
def test_the_length_limit_holds_inside_the_window(
    max_new_tokens: int, policy: SamplingPolicy, target: LanguageModel, prompts: list[tuple[int, ...]]
) -> None:
    out = speculative_generate(target, target, prompts[1], policy, 8, max_new_tokens, stop_ids=())
    assert len(out.token_ids) == max_new_tokens
    assert out.proposed_per_step == (max_new_tokens - 1,)
    assert not out.finished


@pytest.mark.parametrize("place", range(6))
def test_a_stop_token_ends_the_response_wherever_it_falls_in_the_window(
    place: int, target: LanguageModel, prompts: list[tuple[int, ...]]
) -> None:
    plain = plain_generate(target, prompts[0], GREEDY, 12, stop_ids=())
    stop = plain.token_ids[place]
    first = plain.token_ids.index(stop)
    out = speculative_generate(target, target, prompts[0], GREEDY, 4, 12, stop_ids=[stop])
    assert out.token_ids == plain.token_ids[: first + 1]
    assert out.finished


def test_sampled_pairs_follow_the_target(markov: Callable[..., LanguageModel]) -> None:
    """Joint distribution of two tokens, a truncated draft that prefers what the target avoids."""
    table = torch.randn(4, 4, generator=torch.Generator().manual_seed(0))
    target = markov(table)
    draft = markov(-table, kept_ids=torch.tensor([0, 2, 3]))
    trials = 1500
    counts = Counter(
        speculative_generate(draft, target, [1], SAMPLED, 3, 2, seed=seed).token_ids for seed in range(trials)
    )
    probs = torch.softmax(table.double(), -1)
    chi_square = 0.0
    for first in range(4):
        for second in range(4):
            expected = trials * float(probs[1, first] * probs[first, second])
            chi_square += (counts[first, second] - expected) ** 2 / expected
    assert chi_square < 15 + 4 * 30**0.5  # 15 degrees of freedom


def test_sampled_text_stays_inside_the_policy(
    draft: LanguageModel, target: LanguageModel, prompts: list[tuple[int, ...]]
) -> None:
    policy = SamplingPolicy(1.0, top_k=2)
    out = speculative_generate(draft, target, prompts[2], policy, 3, 20, stop_ids=(), seed=4)
    read = torch.tensor([[*prompts[2], *out.token_ids]])
    with torch.no_grad():
        allowed = target.logits(read)[0, len(prompts[2]) - 1 : -1].topk(2).indices
    assert all(token in row for token, row in zip(out.token_ids, allowed.tolist(), strict=True))


def test_the_seed_decides(draft: LanguageModel, target: LanguageModel, prompts: list[tuple[int, ...]]) -> None:
    def run(seed: int) -> tuple[int, ...]:
        return speculative_generate(draft, target, prompts[3], SAMPLED, 3, 15, stop_ids=(), seed=seed).token_ids

    assert run(1) == run(1)
    assert run(1) != run(2)


@pytest.mark.parametrize("policy", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_draft_of_nan_means_no_proposal(
    policy: SamplingPolicy, draft: LanguageModel, target: LanguageModel, prompts: list[tuple[int, ...]]
) -> None:
    out = speculative_generate(with_nan(draft), target, prompts[0], policy, 4, 10, stop_ids=(), seed=3)
    assert out.proposed == 0
    assert out.token_ids == plain_generate(target, prompts[0], policy, 10, stop_ids=(), seed=3).token_ids


def test_a_target_of_nan_is_an_error(draft: LanguageModel, target: LanguageModel) -> None:
    for policy in (GREEDY, SAMPLED):
        with pytest.raises(NonFiniteLogits, match=r"target|sampling"):
            speculative_generate(draft, with_nan(target), [5, 6], policy, 2, 4)


@pytest.mark.numerics
def test_the_cache_reads_on_and_forgets(target: LanguageModel) -> None:
    ids = torch.arange(10, 22)[None]
    with torch.no_grad():
        whole = target.logits(ids)
    cached = CachedModel(target)
    cached.extend(ids[:, :5])
    cached.extend(torch.tensor([[99, 98, 97]]))
    cached.crop(5)
    torch.testing.assert_close(cached.extend(ids[:, 5:], last=4), whole[:, -4:], atol=1e-4, rtol=1e-4)
    assert cached.length == 12
