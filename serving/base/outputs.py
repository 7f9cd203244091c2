"""Results for callers: deltas at each step, and whole outputs at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from distillspec.serving.base.requests import (
    CompletionOutput,
    Request,
    RequestOutput,
    SequenceDelta,
    SequenceState,
    TokenLogprob,
)
from distillspec.serving.base.transfer import to_device, to_host_together


def delta(sequence: SequenceState, before: int, text: str) -> SequenceDelta:
    """Return the delta of a sequence since it had `before` output tokens."""
    return SequenceDelta(
        request_id=sequence.request.id,
        index=sequence.index,
        token_ids=tuple(sequence.output_ids[before:]),
        text=text,
        logprobs=tuple(sequence.logprobs[before:]),
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
    )


def output(request: Request, group: Sequence[SequenceState]) -> RequestOutput:
    """Return the output of a request whose answers are all finished."""
    return RequestOutput(request.id, request.prompt_ids, tuple(_completion(sequence) for sequence in group))


def token_logprobs(logits: Tensor, tokens: Sequence[int], best: Sequence[int]) -> list[TokenLogprob]:
    """Return the raw log-probability of each row's token and of its best alternatives, in one device read.

    Args:
        logits: `[n, V]`.
        tokens: `[n]` ids.
        best: `[n]` numbers of alternatives.
    """
    logprobs = logits.float().log_softmax(-1)
    own = logprobs.gather(1, to_device(list(tokens), logits.device)[:, None])
    top = logprobs.topk(min(max(best), logprobs.shape[-1]))
    values, ids = to_host_together([torch.cat([own, top.values], 1).double(), top.indices.double()])
    return [
        TokenLogprob(token, row[0], dict(zip(map(int, alternatives[:count]), row[1:], strict=False)))
        for token, row, alternatives, count in zip(tokens, values.tolist(), ids.tolist(), best, strict=True)
    ]


def _completion(sequence: SequenceState) -> CompletionOutput:
    assert sequence.finish_reason is not None
    return CompletionOutput(
        index=sequence.index,
        token_ids=tuple(sequence.output_ids),
        text=sequence.text,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
        error=sequence.error,
        logprobs=None if sequence.params.logprobs is None else tuple(sequence.logprobs),
        stats=sequence.stats,
    )
