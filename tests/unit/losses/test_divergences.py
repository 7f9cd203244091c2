"""The dense references: their mathematics, their edge cases, their gradients."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from distillspec.errors import ConfigError
from distillspec.losses import LOSSES, acceptance_rate, fkl, jsd, lk, lk_hybrid, rkl, tvd
from distillspec.sampling import policy_probs
from distillspec.types import SamplingPolicy

INF = math.inf
# q and p with hand-computed divergences: ratios 2, 1, 1/2.
DRAFT = torch.tensor([[0.25, 0.25, 0.5]]).log()
TARGET = torch.tensor([[0.5, 0.25, 0.25]]).log()

seeds = st.integers(0, 10_000)


def logits(seed: int, rows: int = 4, vocab: int = 9, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("fkl", 0.25 * math.log(2)),
        ("rkl", 0.25 * math.log(2)),
        # m = (3/8, 1/4, 3/8): both KLs to it are ½ log(4/3) + ¼ log(2/3)
        ("jsd", 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3)),
        ("tvd", 0.25),
        ("lk", -math.log(0.75)),
        (
            "lk_hybrid",
            math.exp(-2.25) * 0.25 * math.log(2) + (1 - math.exp(-2.25)) * 0.25,
        ),
        ("jsd_kl", 0.5 * math.log(4 / 3) + 0.25 * math.log(2 / 3) + 0.1 * 0.25 * math.log(2)),
    ],
)
def test_a_case_worked_by_hand(name: str, value: float) -> None:
    result = LOSSES[name](DRAFT, TARGET)
    assert (result.shape, result.dtype) == ((1,), torch.float32)
    torch.testing.assert_close(result, torch.tensor([value]))


@pytest.mark.parametrize("name", LOSSES)
@settings(max_examples=15, deadline=None)
@given(seed=seeds, temperature=st.sampled_from([0.2, 1.0, 3.0]))
def test_losses_are_positive_and_vanish_at_equality(name: str, seed: int, temperature: float) -> None:
    draft, target = logits(seed), logits(seed + 1)
    losses = LOSSES[name](draft, target, temperature=temperature)
    assert (losses >= 0).all()
    assert losses.mean() > 1e-3
    # Logits differing by a constant are the same distribution.
    zero = LOSSES[name](target + 5, target, temperature=temperature)
    torch.testing.assert_close(zero, torch.zeros(4), atol=3e-6, rtol=0)


@settings(max_examples=15, deadline=None)
@given(seed=seeds, beta=st.floats(0.01, 0.99))
def test_identities_and_bounds(seed: int, beta: float) -> None:
    draft, target = logits(seed), logits(seed + 1)
    alpha = acceptance_rate(draft, target)
    torch.testing.assert_close(tvd(draft, target), 1 - alpha)
    torch.testing.assert_close(lk(draft, target), -alpha.log())
    torch.testing.assert_close(jsd(draft, target), jsd(target, draft))
    torch.testing.assert_close(jsd(draft, target, beta=beta), jsd(target, draft, beta=1 - beta))
    torch.testing.assert_close(rkl(draft, target), fkl(target, draft))
    entropy = -beta * math.log(beta) - (1 - beta) * math.log(1 - beta)
    assert (jsd(draft, target, beta=beta) <= entropy + 1e-6).all()
    assert (tvd(draft, target) <= (fkl(draft, target) / 2).sqrt() + 1e-6).all()  # Pinsker


def test_jsd_mixture_leans_to_the_target_by_beta() -> None:
    target_probs, draft_probs = TARGET.exp(), DRAFT.exp()
    mixture = 0.9 * target_probs + 0.1 * draft_probs
    expected = 0.9 * (target_probs * (target_probs / mixture).log()).sum()
    expected += 0.1 * (draft_probs * (draft_probs / mixture).log()).sum()
    torch.testing.assert_close(jsd(DRAFT, TARGET, beta=0.9)[0], expected)


def test_temperature_divides_both_logits() -> None:
    draft, target = logits(0), logits(1)
    for name, loss in LOSSES.items():
        torch.testing.assert_close(
            loss(draft, target, temperature=2.0), loss(draft / 2, target / 2), msg=f"{name} differs"
        )


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_match_finite_differences(name: str) -> None:
    draft, target = (
        logits(0, rows=2, vocab=5, scale=1.0).double().requires_grad_(),
        logits(1, rows=2, vocab=5),
    )
    if name == "lk_hybrid":
        # The weight carries no gradient, so finite differences see another function: hold it fixed instead.
        share = torch.exp(-3 * acceptance_rate(draft.detach(), target)).double()
        (expected,) = torch.autograd.grad((share * fkl(draft, target) + (1 - share) * tvd(draft, target)).sum(), draft)
        (gradient,) = torch.autograd.grad(lk_hybrid(draft, target).sum(), draft)
        torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=1e-5)
    else:
        assert torch.autograd.gradcheck(lambda x: LOSSES[name](x, target.double(), temperature=1.5), draft)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("whose", ["draft", "target", "both", "disjoint"])
def test_zero_probabilities_leave_value_and_gradient_finite(name: str, whose: str) -> None:
    draft, target = logits(0), logits(1)
    if whose in ("draft", "both"):
        draft[:, 2] = -INF
    if whose in ("target", "both"):
        target[:, 2] = -INF
    if whose == "disjoint":
        draft[:, ::2], target[:, 1::2] = -INF, -INF
    draft.requires_grad_()
    value = LOSSES[name](draft, target)
    value.sum().backward()
    assert torch.isfinite(value).all()
    assert torch.isfinite(draft.grad).all()
    if whose == "both":  # as if the token did not exist
        rest = [column for column in range(9) if column != 2]
        torch.testing.assert_close(value, LOSSES[name](draft[:, rest], target[:, rest]))


def test_a_token_ruled_out_by_the_draft_costs_its_probability_times_log_tiny() -> None:
    draft, target = torch.tensor([[0.0, -INF]]), torch.tensor([[0.0, 0.0]])
    expected = 0.5 * math.log(0.5) + 0.5 * (math.log(0.5) - math.log(torch.finfo(torch.float32).tiny))
    torch.testing.assert_close(fkl(draft, target), torch.tensor([expected]))


def test_far_apart_distributions_keep_their_gradient() -> None:
    draft = torch.tensor([[0.0, -300.0]], requires_grad=True)
    target = torch.tensor([[-300.0, 0.0]])
    for name in ("fkl", "lk"):  # probabilities underflow, log-probabilities do not
        value = LOSSES[name](draft, target)
        (gradient,) = torch.autograd.grad(value.sum(), draft)
        assert value > 250
        assert gradient.abs().max() > 0.1, name


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("whose", ["draft", "target"])
@pytest.mark.parametrize(("bad", "what"), [(math.nan, "NaN"), (INF, r"\+inf")])
def test_bad_logits_name_loss_model_and_position(name: str, whose: str, bad: float, what: str) -> None:
    models = {"draft": logits(0), "target": logits(1)}
    models[whose][3, 1] = bad
    with pytest.raises(ValueError, match=f"{name}: {whose} logits: {what} at position 3"):
        LOSSES[name](models["draft"], models["target"])


def test_half_precision_logits_are_computed_in_float32() -> None:
    draft, target = logits(0).bfloat16(), logits(1).bfloat16()
    for name, loss in LOSSES.items():
        assert torch.equal(loss(draft, target), loss(draft.float(), target.float())), name


def test_misuse_is_refused_in_plain_words() -> None:
    with pytest.raises(ValueError, match="kept_ids"):
        fkl(logits(0, vocab=5), logits(0, vocab=6))
    with pytest.raises(ConfigError, match="beta=1"):
        jsd(DRAFT, TARGET, beta=1.0)
    with pytest.raises(ConfigError, match="temperature=0"):
        tvd(DRAFT, TARGET, temperature=0.0)
    with pytest.raises(ConfigError, match="eta=-1"):
        lk_hybrid(DRAFT, TARGET, eta=-1)


@pytest.mark.parametrize(
    "policy",
    [SamplingPolicy(0.0), SamplingPolicy(0.7, top_k=3), SamplingPolicy(top_p=0.8, min_p=0.05)],
    ids=["greedy", "top_k", "top_p"],
)
def test_acceptance_under_a_policy_compares_transformed_probabilities(policy: SamplingPolicy) -> None:
    draft, target = logits(0), logits(1)
    expected = torch.minimum(policy_probs(draft, policy), policy_probs(target, policy)).sum(-1)
    torch.testing.assert_close(acceptance_rate(draft, target, policy=policy), expected)
    assert acceptance_rate(target, target, policy=policy).tolist() == pytest.approx([1.0] * 4)


def test_acceptance_of_a_truncated_draft_puts_nothing_outside() -> None:
    kept = torch.tensor([7, 0, 3])
    draft, target = logits(0, vocab=3), logits(1)
    scattered = torch.full((4, 9), -INF).index_copy(1, kept, draft)
    for policy in (SamplingPolicy(), SamplingPolicy(0.5, top_k=2)):
        torch.testing.assert_close(
            acceptance_rate(draft, target, policy=policy, kept_ids=kept),
            acceptance_rate(scattered, target, policy=policy),
        )


def test_acceptance_takes_its_temperature_from_one_place() -> None:
    with pytest.raises(ConfigError, match="put it in the policy"):
        acceptance_rate(DRAFT, TARGET, temperature=0.5, policy=SamplingPolicy())
    with pytest.raises(ValueError, match="kept_ids"):
        acceptance_rate(logits(0, vocab=5), logits(0, vocab=6))


def test_jsd_kl_has_a_gradient_where_the_two_do_not_overlap() -> None:
    draft, target = torch.tensor([[30.0, 0.0, 0.0]], requires_grad=True), torch.tensor([[0.0, 30.0, 0.0]])
    steep, flat = (torch.autograd.grad(LOSSES[name](draft, target).sum(), draft)[0] for name in ("jsd_kl", "jsd"))
    assert float(flat.abs().max()) < 1e-6
    torch.testing.assert_close(steep, torch.tensor([[0.1, -0.1, 0.0]]))
