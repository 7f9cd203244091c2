"""Recording of the writing model's distribution at each token, compressed as it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from distillspec.native.signal_kernel import signal_kernel_for
from distillspec.sampling import draw_each
from distillspec.signals import SignalRequest, TeacherSignal

TINY = torch.finfo(torch.float32).tiny
BLOCK = 64  # neighbouring ids whose maximum is found first


class TopSignal(NamedTuple):
    """Signal at n positions: the K most probable ids, the mass of the others, and m draws from these."""

    ids: Tensor  # [n, K] int32
    logprobs: Tensor  # [n, K] float16, nats, raw
    tail: Tensor  # [n] float32 probability
    tail_ids: Tensor  # [n, m] int32, −1 where the tail has no mass
    tail_logprobs: Tensor  # [n, m] float16


class SignalRecorder:
    """Recorder of one sequence's signal, a position at a time.

    Its draws come from a stream of their own that `seed` alone decides. They neither change the text nor depend on the
    other sequences of the batch.
    """

    def __init__(self, request: SignalRequest, seed: int) -> None:
        self.request = request
        digest = hashlib.sha256(f"signal\x1f{seed}".encode()).digest()
        self.generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
        self._rows: list[tuple[Tensor, ...]] = []

    @staticmethod
    def record(logits: Tensor, recorders: Sequence[SignalRecorder]) -> None:
        """Add one position to the recorder of each row of `logits [n, V]` (raw: temperature 1, no filter).

        A recorder that occurs several times gets its rows in order.
        """
        request = recorders[0].request
        uniforms = torch.stack([torch.rand(request.draws, generator=r.generator) for r in recorders]).to(logits.device)
        if request.kind == "topk":
            columns: Sequence[Tensor] = top_signal(logits, request.entries, uniforms)
        else:
            columns = sampled_signal(logits, uniforms)
        for recorder, row in zip(recorders, zip(*(column.cpu() for column in columns), strict=True), strict=True):
            recorder._rows.append(row)

    def finish(self) -> TeacherSignal:
        columns = [torch.stack(column) for column in zip(*self._rows, strict=True)]
        return TeacherSignal(self.request.kind, *(columns if self.request.tail_draws else columns[:3]))


def top_signal(logits: Tensor, entries: int, uniforms: Tensor | None = None) -> TopSignal:
    """Return the `entries` most probable ids of `logits [n, V]` (any float dtype), and the mass of the others.

    Args:
        uniforms: `[n, m]` in [0, 1), on the logits' device: draws m tokens from the others.
    """
    k = min(entries, logits.shape[-1])
    if (kernel := signal_kernel_for(logits)) is not None:
        ids, exact, _ = kernel.top(logits, k)
    else:
        values, ids = top_of_blocks(logits, k)
        exact = values.float() - torch.logsumexp(logits.float(), -1, keepdim=True)
    logprobs = exact.to(torch.float16)
    # From the rounded values, so that the parts still sum to one.
    tail = (1.0 - logprobs.float().exp().sum(-1)).clamp_min(0.0)
    drawn = draw_from_tail(logits, ids.long(), uniforms)
    return TopSignal(ids.to(torch.int32), logprobs, tail, *drawn)


def draw_from_tail(logits: Tensor, best: Tensor, uniforms: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return m draws `[n, m]` int32 from the ids outside `best [n, K]`, and their log-probabilities, float16."""
    if uniforms is None or uniforms.shape[-1] == 0:
        nothing = logits.new_empty(len(logits), 0)
        return nothing.to(torch.int32), nothing.to(torch.float16)
    probs = torch.softmax(logits.float(), -1).scatter_(-1, best, 0.0)
    ids = draw_each(probs, uniforms)
    mass = probs.gather(-1, ids)
    return ids.masked_fill(mass == 0, -1).to(torch.int32), mass.clamp_min(TINY).log().to(torch.float16)


def top_of_blocks(logits: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest of each row `[n, k]` and their indices, largest first.

    They lie in at most k blocks, those with the k largest maxima. One pass finds these, and only k blocks are sorted.
    """
    width = logits.shape[-1]
    whole = width // BLOCK * BLOCK
    if whole < 4 * k * BLOCK:
        best = logits.topk(k, -1)
        return best.values, best.indices
    blocks = logits[:, :whole].unflatten(-1, (-1, BLOCK))
    chosen = blocks.amax(-1).topk(k, -1, sorted=False).indices
    values = blocks.gather(1, chosen[..., None].expand(-1, -1, BLOCK)).flatten(1)
    places = (chosen[..., None] * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    if whole < width:
        rest = torch.arange(whole, width, device=logits.device).expand(len(logits), -1)
        values, places = torch.cat([values, logits[:, whole:]], -1), torch.cat([places, rest], -1)
    best = values.topk(k, -1)
    return best.values, places.gather(1, best.indices)


def sampled_signal(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return independent draws `[n, m]` from the raw distribution, their log-probabilities, and a tail of 0."""
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    ids = draw_each(logprobs.exp(), uniforms)
    return ids.to(torch.int32), logprobs.gather(-1, ids).to(torch.float16), torch.zeros(len(logits))
