"""What callers get: deltas by step and whole outputs at the end."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from torch import Tensor

from distillspec.serving.requests import (
    CompletionOutput,
    Request,
    RequestOutput,
    Sequence,
    SequenceDelta,
    TokenLogprob,
)


def delta(sequence: Sequence, before: int, text: str) -> SequenceDelta:
    """What a sequence gained since it had `before` output tokens."""
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


def output(request: Request, group: Seq[Sequence]) -> RequestOutput:
    """A request whose answers are all finished."""
    return RequestOutput(request.id, request.prompt_ids, tuple(_completion(sequence) for sequence in group))


def token_logprobs(logits: Tensor, tokens: Seq[int], best: int) -> list[TokenLogprob]:
    """Raw log-probabilities of `tokens`, one for each row of `logits [n, V]`, and of the `best` alternatives."""
    logprobs = logits.float().log_softmax(-1)
    found = []
    for row, token in zip(logprobs, tokens, strict=True):
        top = row.topk(best) if best else None
        alternatives = dict(zip(top.indices.tolist(), top.values.tolist(), strict=True)) if top is not None else {}
        found.append(TokenLogprob(token, float(row[token]), alternatives))
    return found


def _completion(sequence: Sequence) -> CompletionOutput:
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
