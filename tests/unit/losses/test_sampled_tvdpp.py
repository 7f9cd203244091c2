"""TVD++ on text that an earlier draft wrote: the gradient is still that of the present one."""

from __future__ import annotations

import torch
from torch import Tensor

from distillspec.losses.inputs import LossInputs
from distillspec.losses.registry import per_token_loss
from distillspec.losses.sampled import MAX_IMPORTANCE, importance, label_view

VOCAB = 7
EVERY = torch.arange(VOCAB)
DRAWN = torch.ones(VOCAB, dtype=torch.bool)


def models() -> tuple[Tensor, Tensor, Tensor]:
    """Logits `[V]` of target, present draft and the draft that wrote the text, float64."""
    target, draft, change = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    return target, draft, draft + 0.5 * change


def slope(draft: Tensor, target: Tensor, chances: Tensor, **extra: Tensor) -> Tensor:
    """∂/∂logits of the loss of every token, weighed by its chance to be written."""
    logits = draft.clone().requires_grad_()
    rows = logits.expand(VOCAB, -1)
    advantage = torch.linspace(-1, 2, VOCAB)
    inputs = LossInputs(rows, target.expand(VOCAB, -1), labels=EVERY, from_draft=DRAWN, advantage=advantage, **extra)
    (gradient,) = torch.autograd.grad((chances * per_token_loss("tvdpp", inputs).values).sum(), logits)
    return gradient


def test_old_text_gives_the_gradient_of_fresh_text_on_average() -> None:
    target, draft, writer = models()
    now, then = torch.softmax(draft, -1), torch.softmax(writer, -1)
    assert float((now / then).max()) < MAX_IMPORTANCE
    fresh = slope(draft, target, now)
    torch.testing.assert_close(slope(draft, target, then, writer_logprobs=then.log()), fresh)
    assert float((slope(draft, target, then) - fresh).abs().max()) > 0.01  # unweighted, it is another draft's


def test_the_weight_of_old_text_is_bounded_and_one_where_it_is_unknown() -> None:
    """A token of probability 0 was not drawn: its weight is 0, not the largest."""
    target, draft, _ = models()
    inputs = LossInputs(draft.expand(VOCAB, -1), target.expand(VOCAB, -1), labels=EVERY, from_draft=DRAWN)
    now = label_view(inputs).draft_logp
    then = now + torch.tensor([0.0, 1.0, -1.0, -50.0, torch.nan, -torch.inf, 50.0])
    known = LossInputs(
        draft.expand(VOCAB, -1), target.expand(VOCAB, -1), labels=EVERY, from_draft=DRAWN, writer_logprobs=then
    )
    e = torch.tensor(1.0, dtype=torch.float64).exp()
    expected = torch.tensor([1, 1 / e, e, MAX_IMPORTANCE, 1, 0, 0], dtype=torch.float64)
    torch.testing.assert_close(importance(label_view(known), known), expected)
