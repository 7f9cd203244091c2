"""Cases of the chunked loss: hidden states, heads and teachers, and the per-token references on whole logits."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from distillspec.losses import (
    ChunkedLoss,
    DenseTeacher,
    HiddenTeacher,
    LossInputs,
    LossMix,
    NoTeacher,
    SignalTeacher,
    Teacher,
    advantages,
    chunked_loss,
    per_token_loss,
)
from distillspec.losses.sampled import label_view
from distillspec.signals import HiddenSignal, TeacherSignal
from distillspec.types import OutputHead

T, D, V = 11, 6, 14
KEPT = torch.tensor([9, 1, 4, 0, 7, 13, 2])
TEACHERS = ("dense", "hidden", "topk", "sampled", "none")


def noise(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True)
class Case:
    hidden: Tensor
    head: OutputHead
    teacher: Teacher
    kwargs: dict[str, Any]

    @property
    def leaves(self) -> list[Tensor]:
        assert self.head.bias is not None
        return [self.hidden, self.head.weight, self.head.bias]

    def chunked(self, mix: Any, **kwargs: Any) -> ChunkedLoss:
        return chunked_loss(
            self.hidden,
            self.head,
            self.teacher,
            LossMix.parse(mix if isinstance(mix, dict) else {mix: 1.0}),
            **{**self.kwargs, **kwargs},
        )

    def inputs(self, **kwargs: Any) -> LossInputs:
        logits, signal, log_z = self.teacher.chunk(0, T)
        known = {name: value for name, value in self.kwargs.items() if name != "weights"}
        return LossInputs(
            self.head.logits(self.hidden).float(),
            target_logits=logits,
            target_log_z=log_z,
            signal=signal,
            **{**known, **kwargs},
        )


def make(teacher: str, truncated: bool = False, dtype: torch.dtype = torch.float32) -> Case:
    width = len(KEPT) if truncated else V
    head = OutputHead(
        noise(width, D, seed=1).to(dtype).requires_grad_(),
        bias=noise(width, seed=2).to(dtype).requires_grad_(),
        scale=0.8,
        softcap=5.0,
    )
    target_head = OutputHead(noise(V, D + 2, seed=3).to(dtype), softcap=20.0)
    target_hidden = noise(T, D + 2, seed=4).to(dtype)
    logits = target_head.logits(target_hidden).float()
    logp = torch.log_softmax(logits, -1)
    states = HiddenSignal(target_hidden, torch.logsumexp(logits, -1))
    top = logp.topk(4)
    drawn = torch.multinomial(logp.exp(), 5, generator=torch.Generator().manual_seed(5))
    teachers: dict[str, Teacher] = {
        "dense": DenseTeacher(target_hidden, target_head),
        "hidden": HiddenTeacher.of(states, target_head, KEPT if truncated else None),
        "topk": SignalTeacher(TeacherSignal("topk", top.indices.int(), top.values, 1 - top.values.exp().sum(-1))),
        "sampled": SignalTeacher(TeacherSignal("sampled", drawn.int(), logp.gather(-1, drawn), torch.zeros(T))),
        "none": NoTeacher(),
    }
    kwargs = {
        # The target's favourites earn rewards, arbitrary tokens mostly none.
        "labels": torch.where(torch.arange(T) < 6, top.indices[:, 0], torch.arange(T)),
        "from_draft": torch.arange(T) % 3 != 1,
        "weights": torch.tensor([1.0, 0.5, 0.0] * 4)[:T],
        "kept_ids": KEPT if truncated else None,
    }
    return Case(noise(T, D, seed=0).to(dtype).requires_grad_(), head, teachers[teacher], kwargs)


def supported(name: str, teacher: str) -> bool:
    if teacher == "none":
        return name == "ce"
    return teacher != "sampled" or name in ("fkl", "ce")


def reference(case: Case, name: str, **kwargs: Any) -> Tensor:
    inputs = case.inputs(**kwargs)
    if name == "tvdpp":  # chunks cannot see the batch: give both sides the batch's advantages
        view = label_view(inputs)
        assert inputs.from_draft is not None
        inputs = replace(inputs, advantage=advantages(view.reward, view.valid & inputs.from_draft))
    result = per_token_loss(name, inputs)
    weights = case.kwargs["weights"]
    return (weights * result.values).sum() / (weights * result.valid).sum()


def gradients(loss: Tensor, case: Case) -> list[Tensor]:
    return list(torch.autograd.grad(loss, case.leaves))
