"""Log q of a few tokens and of all the others together, with its gradient in closed form.

A recorded signal names K tokens a position. The losses need the draft's distribution at these and as one tail. Under
autograd this takes a dozen passes over `[N, V]`. Here it is a softmax, a scatter and a sum, and the gradient is one
product and a scatter.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

TINY = torch.finfo(torch.float32).tiny


def bucket_logprobs(logits: Tensor, columns: Tensor, known: Tensor) -> Tensor:
    """Return log q `[N, K + 1]` of `logits [N, V]`: at `columns [N, K]` and, last, of all other columns together.

    Where `known [N, K]` is False there is no such column: the entry is −inf and takes no gradient. Known columns are
    distinct within a row. The tail is summed over its own columns, never taken as 1 − Σ, so nothing cancels and no log
    is taken of a negative number. An empty tail is log(smallest normal float32).
    """
    return _BucketLogprobs.apply(logits, columns, known)


class _BucketLogprobs(torch.autograd.Function):
    """With S the known columns, g the incoming gradient, G its sum and q_t the tail's probability:

    ∂/∂z_j = g_j − q_j·G for j in S, and q_j·(g_t / q_t − G) elsewhere.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Tensor, known: Tensor) -> Tensor:
        probs = torch.softmax(logits, -1)
        log_z = logits.amax(-1, keepdim=True) - probs.amax(-1, keepdim=True).log()
        # A missing entry uses the column of the row's first known one, so that scattering twice changes nothing.
        # A row without any known entry rewrites column 0 with its own value.
        first = known.int().argmax(-1, keepdim=True)
        any_known = known.any(-1, keepdim=True)
        columns = torch.where(known, columns, columns.gather(-1, first)).clamp(min=0)
        top_probs = probs.gather(-1, columns)
        rest = probs.scatter_(-1, columns, torch.where(any_known, 0, top_probs))
        tail = rest.sum(-1, keepdim=True).clamp(min=TINY)
        top_logp = (logits.gather(-1, columns) - log_z).masked_fill(~known, -torch.inf)
        ctx.save_for_backward(rest, columns, known, top_probs, tail)
        return torch.cat([top_logp, tail.log()], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        rest, columns, known, top_probs, tail = ctx.saved_tensors
        top_grad = grad[:, :-1].masked_fill(~known, 0)
        total = top_grad.sum(-1, keepdim=True) + grad[:, -1:]
        out = rest * (grad[:, -1:] / tail - total)
        entries = top_grad - top_probs * total
        first = known.int().argmax(-1, keepdim=True)
        entries = torch.where(known, entries, entries.gather(-1, first))
        kept = out.gather(-1, columns)
        return out.scatter_(-1, columns, torch.where(known.any(-1, keepdim=True), entries, kept)), None, None
