"""Truncated vocabularies and recorded signals, held to the dense references."""

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
    fkl,
    per_token_loss,
)
from distillspec.signals import TeacherSignal

from .signal_cases import INF, KEPT, PAIRWISE, N, V, gradient, logits, lumped, scattered, topk_signal


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
