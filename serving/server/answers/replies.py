"""OpenAI's response bodies and stream chunks, made from the engine's outputs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distillspec.serving.base.requests import RequestOutput, TokenLogprob
from distillspec.serving.server.answers.text import TextCodec
from distillspec.serving.server.bridge.request_stream import Delta

Json = dict[str, Any]
LOWEST = -9999.0  # OpenAI's value for minus infinity, which JSON lacks


@dataclass(frozen=True)
class Head:
    """Fields that every body and chunk of one answer repeats, and how its tokens are verified."""

    id: str
    created: int  # seconds since 1970
    model: str
    verification: str = "exact"


def usage(outputs: Sequence[RequestOutput]) -> Json:
    """Return the token counts of all answers together."""
    prompt = sum(len(output.prompt_ids) for output in outputs)
    written = sum(len(answer.token_ids) for output in outputs for answer in output.completions)
    cached = sum(output.stats.prefix_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def speculation(replies: Replies, outputs: Sequence[RequestOutput]) -> Json:
    """Return the speculation counts of all answers together. A position is tried if all before it were accepted."""
    stats = [completion.stats for output in outputs for completion in output.completions]
    tried, accepted = Counter[int](), Counter[int]()
    sources, accepted_by_source = Counter[str](), Counter[str]()  # with those that have 0
    for answer in stats:
        tried.update(dict(enumerate(answer.tried_per_position)))
        accepted.update(dict(enumerate(answer.accepted_per_position)))
        sources.update(answer.sources)
        accepted_by_source.update(answer.accepted_by_source)
    return {
        "verification": replies.head.verification,
        "proposed": sum(answer.proposed for answer in stats),
        "accepted": sum(answer.accepted for answer in stats),
        "tried_per_position": [tried[position] for position in range(len(tried))],
        "accepted_per_position": [accepted[position] for position in range(len(tried))],
        "steps": sum(answer.steps for answer in stats),
        "sources": sources,
        "accepted_by_source": accepted_by_source,
        "draft_versions": list(dict.fromkeys(version for answer in stats for version in answer.draft_versions)),
    }


class CompletionReplies:
    """Bodies of /v1/completions. `logprobs`: the client requested them."""

    object, chunk_object = "text_completion", "text_completion"
    opening: tuple[Json, ...] = ()

    def __init__(self, head: Head, codec: TextCodec, answers: int, logprobs: bool) -> None:
        self.head = head
        self.codec = codec
        self.logprobs = logprobs
        self._offsets = [0] * answers

    def choice(self, delta: Delta) -> Json:
        """Return the choice of a finished answer, or of one chunk. The deltas of an answer must come in order."""
        logprobs = self._logprobs(delta) if self.logprobs else None
        ids = {"token_ids": list(delta.token_ids)} if self.codec.tokenizer is None else {}  # the text is empty
        return {
            "index": delta.choice,
            "text": delta.text,
            **ids,
            "logprobs": logprobs,
            "finish_reason": delta.finish_reason,
        }

    delta = choice

    def _logprobs(self, delta: Delta) -> Json:
        texts, offsets = [], []
        for entry in delta.logprobs:
            texts.append(self.codec.token_text(entry.token))
            offsets.append(self._offsets[delta.choice])
            self._offsets[delta.choice] += len(texts[-1])
        # The written token is always among them, as OpenAI has it.
        entries = [{**entry.best, entry.token: entry.logprob} if entry.best else {} for entry in delta.logprobs]
        best = [{self.codec.token_text(t): _finite(v) for t, v in entry.items()} for entry in entries]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in delta.logprobs],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }


class ChatReplies:
    """Bodies of /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, head: Head, codec: TextCodec, answers: int, logprobs: bool) -> None:
        self.head = head
        self.codec = codec
        self.logprobs = logprobs
        # The first chunk of each answer names the role.
        first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        self.opening: tuple[Json, ...] = tuple({"index": index, **first} for index in range(answers))

    def choice(self, delta: Delta) -> Json:
        """Return the choice of a finished answer."""
        message = {"role": "assistant", "content": delta.text, "refusal": None}
        return {"index": delta.choice, "message": message, **self._rest(delta)}

    def delta(self, delta: Delta) -> Json:
        """Return the choice of one chunk."""
        return {"index": delta.choice, "delta": {"content": delta.text} if delta.text else {}, **self._rest(delta)}

    def _rest(self, delta: Delta) -> Json:
        logprobs = {"content": [self._logprob(entry) for entry in delta.logprobs]} if self.logprobs else None
        return {"logprobs": logprobs, "finish_reason": delta.finish_reason}

    def _logprob(self, entry: TokenLogprob) -> Json:
        best = [self._token(token, value) for token, value in entry.best.items()]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": best}

    def _token(self, token: int, logprob: float) -> Json:
        text, spelt = self.codec.token_text(token), self.codec.token_bytes(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": spelt}


Replies = CompletionReplies | ChatReplies


def full_body(replies: Replies, choices: Sequence[Json], outputs: Sequence[RequestOutput]) -> Json:
    """Return the body of an answer that is not streamed."""
    head = replies.head
    return {
        "id": head.id,
        "object": replies.object,
        "created": head.created,
        "model": head.model,
        "choices": list(choices),
        "usage": usage(outputs),
        "speculation": speculation(replies, outputs),
    }


def chunk(replies: Replies, choices: Sequence[Json], **more: Any) -> Json:
    """Return the body of one event of a stream."""
    head = replies.head
    return {
        "id": head.id,
        "object": replies.chunk_object,
        "created": head.created,
        "model": head.model,
        "choices": list(choices),
        **more,
    }


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else LOWEST
