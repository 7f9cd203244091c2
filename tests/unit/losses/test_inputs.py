"""Truncated vocabularies, recorded signals and labels, held to the dense references."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses import (
    LOSSES,
    LossInputs,
    acceptance_of,
    acceptance_rate,
    advantages,
    ce,
    fkl,
    per_token_loss,
    tvdpp,
)
from distillspec.types import TeacherSignal

INF = math.inf
N, V = 6, 12
KEPT = torch.tensor([9, 1, 4, 0, 7])
PAIRWISE = tuple(LOSSES)


def logits(seed: int, vocab: int = V) -> Tensor:
    return 2 * torch.randn(N, vocab, generator=torch.Generator().manual_seed(seed))


def topk_signal(target: Tensor, entries: int) -> TeacherSignal:
    top = torch.log_softmax(target.double(), -1).topk(entries)
    tail = (1 - top.values.exp().sum(-1)).clamp(min=0)  # in float32 its rounding, times log(tiny) = −87, would show
    return TeacherSignal("topk", top.indices.int(), top.values.float(), tail.float())


def scattered(draft: Tensor) -> Tensor:
    return torch.full((N, V), -INF).index_copy(1, KEPT, draft)


def lumped(values: Tensor, ids: Tensor) -> Tensor:
    """Log-probabilities `[N, K + 1]` of the given ids and of all others together, by plain sums."""
    probs = torch.softmax(values, -1)
    top = probs.gather(-1, ids.long())
    rest = probs.scatter(-1, ids.long(), 0).sum(-1, keepdim=True)
    both = torch.cat([top, rest], -1)
    return torch.where(both > 0, both, 1).log().masked_fill(both == 0, -INF)


def gradient(loss: Tensor, leaf: Tensor) -> Tensor:
    return torch.autograd.grad(loss.sum(), leaf)[0]


@pytest.mark.parametrize("name", PAIRWISE)
def test_dense_inputs_give_the_reference(name: str) -> None:
    draft, target = logits(0), logits(1)
    result = per_token_loss(name, LossInputs(draft, target, temperature=1.7))
    torch.testing.assert_close(result.values, LOSSES[name](draft, target, temperature=1.7))
    assert result.valid.all()
    assert (result.outside == 0).all()


@pytest.mark.parametrize("name", [name for name in PAIRWISE if name not in ("fkl", "jsd_kl", "lk_hybrid")])
def test_truncated_equals_dense_with_minus_infinity_outside(name: str) -> None:
    draft, target = logits(0, len(KEPT)).requires_grad_(), logits(1)
    result = per_token_loss(name, LossInputs(draft, target, kept_ids=KEPT, temperature=1.3))
    dense = LOSSES[name](scattered(draft), target, temperature=1.3)
    torch.testing.assert_close(result.values, dense)
    torch.testing.assert_close(gradient(result.values, draft), gradient(dense, draft))
    outside = 1 - torch.softmax(target / 1.3, -1)[:, KEPT].sum(-1)
    torch.testing.assert_close(result.outside, outside)


def test_truncated_fkl_compares_with_the_target_renormalised_over_kept_ids() -> None:
    draft, target = logits(0, len(KEPT)), logits(1)
    result = per_token_loss("fkl", LossInputs(draft, target, kept_ids=KEPT))
    torch.testing.assert_close(result.values, fkl(draft, target[:, KEPT]))


def test_truncated_hybrid_joins_renormalised_kl_and_full_tvd() -> None:
    draft, target = logits(0, len(KEPT)), logits(1)
    inputs = LossInputs(draft, target, kept_ids=KEPT)
    alpha = acceptance_rate(draft, target, kept_ids=KEPT)
    share = torch.exp(-2 * alpha)
    expected = share * fkl(draft, target[:, KEPT]) + (1 - share) * (1 - alpha)
    torch.testing.assert_close(per_token_loss("lk_hybrid", inputs, eta=2).values, expected)
    torch.testing.assert_close(acceptance_of(inputs), alpha)


@pytest.mark.parametrize("name", PAIRWISE)
def test_recording_the_whole_vocabulary_equals_dense(name: str) -> None:
    draft, target = logits(0).requires_grad_(), logits(1)
    sparse = per_token_loss(name, LossInputs(draft, signal=topk_signal(target, V)))
    dense = LOSSES[name](draft, target)
    torch.testing.assert_close(sparse.values, dense)
    torch.testing.assert_close(gradient(sparse.values, draft), gradient(dense, draft), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", PAIRWISE)
def test_topk_equals_dense_on_lumped_distributions(name: str) -> None:
    draft, target = logits(0).requires_grad_(), logits(1)
    signal = topk_signal(target, 4)
    sparse = per_token_loss(name, LossInputs(draft, signal=signal))
    dense = LOSSES[name](lumped(draft, signal.ids), lumped(target, signal.ids))
    torch.testing.assert_close(sparse.values, dense)
    torch.testing.assert_close(gradient(sparse.values, draft), gradient(dense, draft), atol=1e-6, rtol=1e-4)
    assert (sparse.values <= LOSSES[name](draft, target) + 1e-6).all() or name == "lk_hybrid"


def test_a_tail_that_rounding_hid_rules_nothing_out() -> None:
    """float16 entries may sum to 1: what the draft has elsewhere then costs little, not 87 nats a token."""
    signal = replace(topk_signal(logits(1), 4), tail=torch.zeros(len(logits(1))))
    draft = (0.02 * logits(0)).requires_grad_()
    result = per_token_loss("rkl", LossInputs(draft, signal=signal)).values
    outside = 1 - torch.softmax(draft, -1).gather(-1, signal.ids.long()).sum(-1).detach()
    assert float(outside.min()) > 0.5
    assert float(result.detach().max()) < 12  # half a float16 unit is 8.3 nats
    sharp = torch.full_like(draft, -30.0).scatter(-1, signal.ids.long(), signal.logprobs.float())
    agreed = per_token_loss("rkl", LossInputs(sharp, signal=signal)).values
    assert float(agreed.abs().max()) < 0.01


@pytest.mark.parametrize("name", PAIRWISE)
def test_topk_with_truncation_equals_dense_on_lumped_distributions(name: str) -> None:
    draft, target = logits(0, len(KEPT)).requires_grad_(), logits(1)
    signal = topk_signal(target, 4)
    result = per_token_loss(name, LossInputs(draft, signal=signal, kept_ids=KEPT))
    kept = torch.isin(signal.ids, KEPT)
    target_logp = lumped(target, signal.ids)
    target_logp[:, :4].masked_fill_(~kept & torch.tensor(name == "fkl"), -INF)  # fkl: renormalised
    dense = LOSSES[name](lumped(scattered(draft), signal.ids), target_logp)
    if name in ("lk_hybrid", "jsd_kl"):
        inside = target_logp.clone()
        inside[:, :4].masked_fill_(~kept, -INF)
        both = lumped(scattered(draft), signal.ids)
        share = torch.exp(-3 * acceptance_rate(both, target_logp)).detach()
        dense = share * fkl(both, inside) + (1 - share) * LOSSES["tvd"](both, target_logp)
        if name == "jsd_kl":
            dense = LOSSES["jsd"](both, target_logp) + 0.1 * fkl(both, inside)
    torch.testing.assert_close(result.values, dense)
    torch.testing.assert_close(result.outside, torch.where(kept, 0, signal.logprobs.exp()).sum(-1))
    torch.testing.assert_close(gradient(result.values, draft), gradient(dense, draft), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("name", PAIRWISE)
@pytest.mark.parametrize("kept_ids", [None, KEPT], ids=["full", "truncated"])
def test_empty_buckets_leave_value_and_gradient_finite(name: str, kept_ids: Tensor | None) -> None:
    width = V if kept_ids is None else len(kept_ids)
    draft, target = logits(0, width), logits(1)
    draft[:, 2:] = -INF  # most recorded tokens and the tail have no draft mass
    target[:, 8:] = -INF  # 8 recorded ids hold all of it: the tail is zero
    signal = topk_signal(target, 8)
    assert (signal.tail < 1e-6).all()
    signal = TeacherSignal("topk", signal.ids, signal.logprobs.half(), torch.zeros(N))
    draft.requires_grad_()
    result = per_token_loss(name, LossInputs(draft, signal=signal, kept_ids=kept_ids))
    assert torch.isfinite(result.values).all()
    assert torch.isfinite(gradient(result.values, draft)).all()


def test_topk_acceptance_is_an_upper_bound() -> None:
    draft, target = logits(0), logits(1)
    bound = acceptance_of(LossInputs(draft, signal=topk_signal(target, 3)))
    assert bound is not None
    assert (bound >= acceptance_rate(draft, target) - 1e-6).all()


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


@pytest.mark.parametrize("name", [*PAIRWISE, "tvdpp"])
def test_losses_without_a_target_say_so(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} needs a target"):
        per_token_loss(name, LossInputs(logits(0)))


def test_misuse_is_refused_in_plain_words() -> None:
    draft, target = logits(0), logits(1)
    signal = topk_signal(target, 3)
    with pytest.raises(ConfigError, match="temperature=2"):
        LossInputs(draft, signal=signal, temperature=2.0)
    with pytest.raises(ValueError, match="not both"):
        LossInputs(draft, target, signal=signal)
    with pytest.raises(ValueError, match="slice padded columns"):
        LossInputs(draft, logits(1, V + 4))
    with pytest.raises(ValueError, match="each of the 5 draft columns"):
        LossInputs(logits(0, 5), target, kept_ids=KEPT[:3])
    with pytest.raises(ValueError, match="labels has 2 rows"):
        LossInputs(draft, labels=torch.tensor([1, 2]))
    with pytest.raises(ValueError, match="token id 11 lies outside"):
        per_token_loss("ce", LossInputs(logits(0, 5), labels=torch.full((N,), 11)))
    with pytest.raises(ConfigError, match="unknown loss 'kl'; known: fkl, rkl"):
        per_token_loss("kl", LossInputs(draft, target))
    with pytest.raises(ConfigError, match="jsd has no parameter 'gamma'; it has: beta"):
        per_token_loss("jsd", LossInputs(draft, target), gamma=1)
    with pytest.raises(ConfigError, match="need labels"):
        per_token_loss("ce", LossInputs(draft))
    with pytest.raises(ConfigError, match="needs from_draft"):
        per_token_loss("tvdpp", LossInputs(draft, target, labels=torch.zeros(N).long()))


@pytest.mark.parametrize("name", [*PAIRWISE, "ce", "tvdpp"])
def test_bad_logits_name_the_loss_and_the_position_in_the_batch(name: str) -> None:
    draft = logits(0)
    draft[2, 1] = math.nan
    labels, sampled = torch.zeros(N).long(), torch.ones(N).bool()
    inputs = LossInputs(draft, logits(1), labels=labels, from_draft=sampled, first_position=40)
    with pytest.raises(ValueError, match=f"{name}: draft logits: NaN at position 42"):
        per_token_loss(name, inputs)


def test_a_damaged_signal_is_named_and_a_rounded_tail_is_harmless() -> None:
    good = topk_signal(logits(1), 4)
    broken = good.logprobs.clone()
    broken[3, 0] = math.nan
    with pytest.raises(ValueError, match="tvd: signal: NaN at position 3"):
        per_token_loss("tvd", LossInputs(logits(0), signal=TeacherSignal("topk", good.ids, broken, good.tail)))
    below_zero = TeacherSignal("topk", good.ids, good.logprobs, torch.full((N,), -1e-8))
    zero = TeacherSignal("topk", good.ids, good.logprobs, torch.zeros(N))
    values = [per_token_loss("rkl", LossInputs(logits(0), signal=signal)).values for signal in (below_zero, zero)]
    assert torch.equal(*values)
