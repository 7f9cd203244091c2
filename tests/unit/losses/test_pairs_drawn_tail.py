"""Tokens drawn from a recorded signal's tail make losses and acceptance unbiased. One bucket for the tail does not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from distillspec.losses import LOSSES
from distillspec.losses.acceptance_direct import acceptance_rate
from distillspec.losses.inputs import LossInputs
from distillspec.losses.registry import acceptance_of, per_token_loss
from distillspec.losses.sampled import label_view
from distillspec.signals import TeacherSignal

VOCAB, ENTRIES, DRAWS, ROWS = 30, 5, 3, 20_000


def models() -> tuple[Tensor, Tensor]:
    """Return float64 logits `[V]` of a target with a heavy tail, and of a draft that is wrong there."""
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(VOCAB, generator=generator, dtype=torch.float64)
    return target, 0.5 * target + torch.randn(VOCAB, generator=generator, dtype=torch.float64)


def recorded(target: Tensor, rows: int, draws: int = DRAWS) -> TeacherSignal:
    """`rows` times the same position, each with draws of its own."""
    logprobs = torch.log_softmax(target, -1)
    best = logprobs.topk(ENTRIES)
    rest = logprobs.exp().scatter(0, best.indices, 0.0)
    drawn = torch.multinomial(rest.expand(rows, -1), draws, replacement=True)
    return TeacherSignal(
        "topk",
        best.indices.int().expand(rows, -1),
        best.values.expand(rows, -1),
        rest.sum().expand(rows),
        drawn.int(),
        logprobs[drawn],
    )


def off(estimates: Tensor, truth: Tensor) -> Tensor:
    """Return the standard errors between the mean of `estimates [N, ...]` and `truth`. Rounding is no error."""
    return (estimates.mean(0) - truth).abs() / (estimates.std(0) / len(estimates) ** 0.5 + 1e-9)


@pytest.mark.parametrize("name", ["fkl", "rkl", "jsd", "jsd_kl", "tvd"])
def test_losses_and_their_gradients_are_unbiased(name: str) -> None:
    target, draft = models()
    logits = draft.clone().requires_grad_()
    truth = LOSSES[name](logits[None], target[None])[0]
    (slope,) = torch.autograd.grad(truth, logits)
    truth = truth.detach()
    rows = draft.expand(ROWS, -1).clone().requires_grad_()
    values = per_token_loss(name, LossInputs(rows, signal=recorded(target, ROWS))).values
    (slopes,) = torch.autograd.grad(values.sum(), rows)
    assert float(off(values.detach(), truth)) < 4
    assert float(off(slopes, slope).max()) < 4.5
    lumped = TeacherSignal("topk", *(getattr(recorded(target, 1), n) for n in ("ids", "logprobs", "tail")))
    biased = per_token_loss(name, LossInputs(draft[None], signal=lumped)).values
    assert float(biased - truth) < -0.02  # the tail as one bucket hides what is wrong inside


def test_acceptance_is_unbiased() -> None:
    target, draft = models()
    truth = acceptance_rate(draft[None], target[None])[0]
    estimates = acceptance_of(LossInputs(draft.expand(ROWS, -1), signal=recorded(target, ROWS)))
    assert estimates is not None
    assert float(off(estimates, truth)) < 4


def test_a_truncated_drafts_lacking_tokens_count_as_outside() -> None:
    target, draft = models()
    kept = torch.arange(0, VOCAB, 2)
    inputs = LossInputs(draft[kept].expand(ROWS, -1), signal=recorded(target, ROWS), kept_ids=kept)
    lacking = torch.softmax(target, -1)[1::2].sum()
    assert float(off(inputs.pair.outside, lacking)) < 4
    truth = acceptance_rate(draft[kept][None], target[None], kept_ids=kept)[0]
    estimates = acceptance_of(inputs)
    assert estimates is not None
    assert float(off(estimates, truth)) < 4


def test_rows_without_draws_keep_their_tail_as_one_bucket() -> None:
    target, draft = models()
    signal = recorded(target, 2)
    assert signal.tail_ids is not None
    none_drawn = signal.tail_ids.clone()
    none_drawn[1] = -1
    mixed = TeacherSignal("topk", signal.ids, signal.logprobs, signal.tail, none_drawn, signal.tail_logprobs)
    lumped = TeacherSignal("topk", signal.ids, signal.logprobs, signal.tail)
    for name in ("fkl", "rkl", "tvd", "lk"):

        def loss(of: TeacherSignal, name: str = name) -> Tensor:
            return per_token_loss(name, LossInputs(draft.expand(2, -1), signal=of)).values

        torch.testing.assert_close(loss(mixed), torch.stack([loss(signal)[0], loss(lumped)[1]]))


def test_labels_are_looked_up_in_the_tail_as_one_bucket() -> None:
    target, draft = models()
    signal = recorded(target, VOCAB)
    lumped = TeacherSignal("topk", signal.ids, signal.logprobs, signal.tail)
    views = [
        label_view(LossInputs(draft.expand(VOCAB, -1), signal=s, labels=torch.arange(VOCAB))) for s in (signal, lumped)
    ]
    torch.testing.assert_close(views[0].target_logp, views[1].target_logp)


@pytest.mark.parametrize("change", [lambda s: s.rows(1, 3), lambda s: s.to("cpu").rows(1, 3)])
def test_draws_go_where_their_rows_go(change: Callable[[TeacherSignal], TeacherSignal]) -> None:
    signal = recorded(models()[0], 4)
    assert signal.tail_ids is not None
    assert torch.equal(change(signal).tail_ids, signal.tail_ids[1:3])  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "least"), [("jsd", 0.6), ("tvd", 0.9), ("rkl", 1.0), ("jsd_kl", 0.6)])
def test_mass_cannot_hide_on_tail_tokens_that_are_never_drawn(name: str, least: float) -> None:
    """A rare token is hardly ever drawn: positions that did not draw it must charge a draft that puts all there."""
    target = torch.linspace(0, -8, VOCAB, dtype=torch.float64)
    rare = VOCAB - 1
    signal = recorded(target, 50)
    assert signal.tail_ids is not None
    assert not bool((signal.tail_ids == rare).any())
    hiding = torch.zeros(VOCAB, dtype=torch.float64).index_fill(0, torch.tensor(rare), 12.0)
    rows = hiding.expand(50, -1).clone().requires_grad_()
    values = per_token_loss(name, LossInputs(rows, signal=signal)).values
    assert float(values.detach().min()) > least
    if name != "jsd":  # whose slope vanishes so far away
        (slopes,) = torch.autograd.grad(values.sum(), rows)
        assert float(slopes[:, rare].min()) > 0
