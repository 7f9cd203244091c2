"""Logits, recorded signals and lumped distributions for the tests of loss inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from distillspec.losses import (
    LOSSES,
)
from distillspec.signals import TeacherSignal

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
