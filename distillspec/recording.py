"""Recording what the writing model thought at each token, compressed as it is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.sampling import draw
from distillspec.types import SignalRequest, TeacherSignal


class SignalRecorder:
    """Collects one sequence's signal, a position at a time."""

    def __init__(self, request: SignalRequest, generator: torch.Generator) -> None:
        self.request = request
        self.generator = generator
        self._rows: list[tuple[Tensor, Tensor, Tensor]] = []

    @staticmethod
    def record(logits: Tensor, recorders: Sequence[SignalRecorder]) -> None:
        """Add one position to each recorder from `logits [n, V]` (raw: temperature 1, no filter)."""
        request = recorders[0].request
        if request.kind == "topk":
            ids, logprobs, tail = top_entries(logits, request.entries)
        else:
            uniforms = torch.stack([torch.rand(request.entries, generator=r.generator) for r in recorders])
            ids, logprobs, tail = sampled_entries(logits, uniforms)
        ids, logprobs = ids.to(torch.int32).cpu(), logprobs.to(torch.float16).cpu()
        for i, recorder in enumerate(recorders):
            recorder._rows.append((ids[i], logprobs[i], tail[i].cpu()))

    def finish(self) -> TeacherSignal:
        ids, logprobs, tails = zip(*self._rows, strict=True)
        return TeacherSignal(self.request.kind, torch.stack(ids), torch.stack(logprobs), torch.stack(tails))


def top_entries(logits: Tensor, entries: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `entries` most probable ids `[n, K]`, their log-probabilities, and the mass of the rest `[n]`."""
    top = torch.topk(logits, min(entries, logits.shape[-1]), dim=-1)
    logprobs = top.values - torch.logsumexp(logits, dim=-1, keepdim=True)
    # Stored in float16; the tail is taken from the rounded values so that the parts still sum to one.
    kept = logprobs.to(torch.float16).float().exp().sum(-1)
    return top.indices, logprobs, (1.0 - kept).clamp_min(0.0)


def sampled_entries(logits: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Independent draws `[n, K]` from the raw distribution with their log-probabilities; no tail."""
    logprobs = torch.log_softmax(logits, dim=-1)
    probs = logprobs.exp()
    columns = [draw(probs, uniforms[:, k].to(probs.device)) for k in range(uniforms.shape[1])]
    ids = torch.stack(columns, dim=-1)
    return ids, logprobs.gather(-1, ids), torch.zeros(len(logits))
