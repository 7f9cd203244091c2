"""Losses on single tokens: hard labels, draft samples, and tokens drawn from the target."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses import (
    LossInputs,
    acceptance_of,
    acceptance_rate,
    advantages,
    ce,
    fkl,
    per_token_loss,
    tvdpp,
)
from distillspec.signals import TeacherSignal

from .signal_cases import KEPT, PAIRWISE, N, V, gradient, logits, topk_signal


def test_sampled_signal_is_unbiased_for_fkl_gradient_and_alpha() -> None:
    """Every token once, weighted by its probability, is the expectation over draws."""
    draft, target = logits(0)[:1].requires_grad_(), logits(1)[:1]
    probs, logp = torch.softmax(target, -1)[0], torch.log_softmax(target, -1)
    each = TeacherSignal("sampled", torch.arange(V).int()[:, None], logp.T, torch.zeros(V))
    inputs = LossInputs(draft.expand(V, V), signal=each)
    cross_entropy = (probs * per_token_loss("fkl", inputs).values).sum()
    entropy = -(probs * logp[0]).sum()
    reference = fkl(draft, target)
    torch.testing.assert_close(cross_entropy - entropy, reference[0])
    torch.testing.assert_close(gradient(cross_entropy, draft), gradient(reference, draft))
    alpha = acceptance_of(inputs)
    assert alpha is not None
    torch.testing.assert_close((probs * alpha).sum(), acceptance_rate(draft.detach(), target)[0])


def test_sampled_tokens_outside_a_truncated_draft_are_left_out() -> None:
    ids = torch.tensor([[9, 2, 1], [2, 3, 5]], dtype=torch.int32)
    draft = logits(0, len(KEPT))[:2]
    signal = TeacherSignal("sampled", ids, torch.full((2, 3), -1.0), torch.zeros(2))
    result = per_token_loss("fkl", LossInputs(draft, signal=signal, kept_ids=KEPT))
    logq = torch.log_softmax(draft, -1)
    torch.testing.assert_close(result.values, torch.stack([-(logq[0, 0] + logq[0, 1]) / 2, torch.tensor(0.0)]))
    assert result.valid.tolist() == [True, False]
    torch.testing.assert_close(result.outside, torch.tensor([1 / 3, 1.0]))


@pytest.mark.parametrize("name", [name for name in (*PAIRWISE, "tvdpp") if name != "fkl"])
def test_sampled_signals_support_forward_kl_only(name: str) -> None:
    signal = TeacherSignal("sampled", torch.zeros(N, 2).int(), torch.zeros(N, 2), torch.zeros(N))
    with pytest.raises(ConfigError, match=f"{name} needs the target's distribution"):
        per_token_loss(name, LossInputs(logits(0), signal=signal))


def test_hard_labels_outside_the_draft_are_invalid() -> None:
    draft = logits(0, len(KEPT))
    labels = torch.tensor([9, 2, 0, -100, 7, 11])
    result = per_token_loss("ce", LossInputs(draft, kept_ids=KEPT, labels=labels, temperature=3.0))
    assert result.valid.tolist() == [True, False, True, False, True, False]
    assert result.outside.tolist() == [0, 1, 0, 0, 0, 1]
    columns = torch.tensor([0, 0, 3, 0, 4, 0])
    expected = torch.nn.functional.cross_entropy(draft, columns, reduction="none") * result.valid
    torch.testing.assert_close(result.values, expected)


def test_ce_is_cross_entropy_at_temperature_one() -> None:
    draft, labels = logits(0), torch.arange(N)
    expected = torch.nn.functional.cross_entropy(draft, labels, reduction="none")
    torch.testing.assert_close(ce(draft, labels=labels, temperature=2.0), expected)


@pytest.mark.parametrize("kind", ["dense", "topk", "truncated"])
def test_tvdpp_without_its_baseline_has_the_gradient_of_tvd_in_expectation(kind: str) -> None:
    """Σ_x q(x) ∇(−r(x) log q(x)), the vocabulary enumerated, is exactly ∇ TVD of the same buckets."""
    width = len(KEPT) if kind == "truncated" else V
    draft, target = logits(0, width)[:1].requires_grad_(), logits(1)[:1]
    expanded = LossInputs(
        draft.expand(width, width),
        target.expand(width, V) if kind != "topk" else None,
        signal=_expanded(topk_signal(target, 3), V) if kind == "topk" else None,
        kept_ids=KEPT if kind == "truncated" else None,
        labels=KEPT if kind == "truncated" else torch.arange(width),
        from_draft=torch.ones(width, dtype=torch.bool),
        advantage=_rewards(draft, target, kind),
    )
    draft_probs = torch.softmax(draft.detach(), -1)[0]
    expected = gradient(per_token_loss("tvd", expanded).values[:1], draft)
    torch.testing.assert_close(
        gradient(draft_probs * per_token_loss("tvdpp", expanded).values, draft),
        expected,
        atol=1e-6,
        rtol=1e-4,
    )


def _expanded(signal: TeacherSignal, rows: int) -> TeacherSignal:
    ids, logprobs = signal.ids[:1].expand(rows, -1), signal.logprobs[:1].expand(rows, -1)
    return TeacherSignal("topk", ids, logprobs, signal.tail[:1].expand(rows))


def _rewards(draft: Tensor, target: Tensor, kind: str) -> Tensor:
    target_probs, draft_probs = torch.softmax(target, -1)[0], torch.softmax(draft.detach(), -1)[0]
    if kind == "truncated":
        return (target_probs[KEPT] > draft_probs).float()
    if kind == "topk":
        top = target_probs.topk(3).indices
        in_tail = torch.ones(V, dtype=torch.bool).index_fill(0, top, False)
        tail_reward = target_probs[in_tail].sum() > draft_probs[in_tail].sum()
        return torch.where(in_tail, tail_reward, target_probs > draft_probs).float()
    return (target_probs > draft_probs).float()


def test_tvdpp_weighs_only_draft_samples_by_their_advantage() -> None:
    draft, target = logits(0), logits(1)
    labels, from_draft = torch.tensor([0, 1, 2, 3, 4, 5]), torch.tensor([1, 1, 0, 1, 1, 0]).bool()
    p, q = (torch.softmax(x, -1).gather(1, labels[:, None])[:, 0] for x in (target, draft))
    reward = (p > q).float()
    assert 0 < reward[from_draft].sum() < 4
    advantage = (reward - reward[from_draft].mean()) / reward[from_draft].std(correction=0)
    expected = torch.where(from_draft, -advantage * q.log(), 0)
    torch.testing.assert_close(tvdpp(draft, target, labels=labels, from_draft=from_draft), expected)
    inputs = LossInputs(draft, target, labels=labels, from_draft=from_draft)
    assert per_token_loss("tvdpp", inputs).valid.tolist() == from_draft.tolist()
    torch.testing.assert_close(per_token_loss("tvdpp", inputs).values, expected)


def test_equal_rewards_carry_no_advantage() -> None:
    assert advantages(torch.ones(4), torch.tensor([1, 1, 1, 0]).bool()).tolist() == [0, 0, 0, 0]


def test_advantages_are_standardised_over_the_mask() -> None:
    reward = torch.tensor([1.0, 0.0, 1.0, 1.0, 0.0])
    mask = torch.tensor([True, True, True, True, False])
    expected = torch.tensor([1.0, -3.0, 1.0, 1.0, 0.0]) / math.sqrt(3)
    torch.testing.assert_close(advantages(reward, mask), expected)
    assert advantages(reward, torch.zeros(5).bool()).tolist() == [0.0] * 5
