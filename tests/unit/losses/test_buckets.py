"""The closed-form bucket gradient against autograd through the plain definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from distillspec.losses.buckets import bucket_logprobs


def plain(logits: Tensor, columns: Tensor, known: Tensor) -> Tensor:
    """The definition, a row at a time."""
    logp = torch.log_softmax(logits, -1)
    rows = []
    for row, cols, have in zip(logp, columns, known, strict=True):
        inside = cols[have]
        rest = torch.ones(row.numel(), dtype=torch.bool).index_fill(0, inside, False)
        top = torch.full((cols.numel(),), -torch.inf, dtype=row.dtype)
        top = top.masked_scatter(have, row[inside])
        rows.append(torch.cat([top, torch.logsumexp(row[rest], -1, keepdim=True)]))
    return torch.stack(rows)


@pytest.mark.parametrize("present", ["all", "some", "none"])
def test_value_and_gradient_equal_the_definition(present: str) -> None:
    torch.manual_seed(0)
    logits = torch.randn(7, 23, dtype=torch.float64).requires_grad_()
    columns = torch.stack([torch.randperm(23)[:5] for _ in range(7)])
    known = {"all": torch.ones(7, 5), "some": torch.rand(7, 5) < 0.6, "none": torch.zeros(7, 5)}[present].bool()
    columns = columns.masked_fill(~known, -1)
    weights = torch.rand(7, 6, dtype=torch.float64)
    mask = torch.cat([known, torch.ones(7, 1, dtype=torch.bool)], -1)

    def loss(function: object) -> tuple[Tensor, Tensor]:
        out = function(logits, columns, known)  # type: ignore[operator]
        value = torch.where(mask, out, 0) * weights
        return out.detach(), torch.autograd.grad(value.sum(), logits)[0]

    ours, ours_grad = loss(bucket_logprobs)
    theirs, theirs_grad = loss(plain)
    torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(ours_grad, theirs_grad)


def test_zero_probability_columns_and_an_empty_tail_stay_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -torch.inf, -torch.inf]]).requires_grad_()
    out = bucket_logprobs(logits, torch.tensor([[0, 1]]), torch.tensor([[True, True]]))
    assert torch.isfinite(out).all()
    (grad,) = torch.autograd.grad((out * torch.tensor([[0.5, 0.5, 0.0]])).sum(), logits)
    assert torch.isfinite(grad).all()
    assert grad[0, 2:].abs().max() == 0
