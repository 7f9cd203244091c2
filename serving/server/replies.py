"""OpenAI's response bodies, and their chunks for streams, from what the engine wrote."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distillspec.serving.requests import RequestOutput, TokenLogprob
from distillspec.serving.server.text import TextCodec
from distillspec.serving.server.ticket import Gain

Json = dict[str, Any]
LOWEST = -9999.0  # OpenAI's word for minus infinity, which JSON does not have


@dataclass(frozen=True)
class Head:
    """What every body and chunk of one answer repeats."""

    id: str
    created: int  # seconds since 1970
    model: str


def usage(outputs: Sequence[RequestOutput]) -> Json:
    """Token counts of all answers together."""
    prompt = sum(len(output.prompt_ids) for output in outputs)
    written = sum(len(answer.token_ids) for output in outputs for answer in output.completions)
    cached = sum(output.stats.prefix_tokens for output in outputs)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": written,
        "total_tokens": prompt + written,
        "prompt_tokens_details": {"cached_tokens": cached},
    }


def speculation(outputs: Sequence[RequestOutput]) -> Json:
    """What was drafted for all answers together; a position is tried when all before it stood."""
    stats = [answer.stats for output in outputs for answer in output.completions]
    tried: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for own in stats:
        tried.update(dict(enumerate(own.tried_per_position)))
        accepted.update(dict(enumerate(own.accepted_per_position)))
    return {
        "proposed": sum(own.proposed for own in stats),
        "accepted": sum(own.accepted for own in stats),
        "tried_per_position": [tried[place] for place in range(len(tried))],
        "accepted_per_position": [accepted[place] for place in range(len(tried))],
        "steps": sum(own.steps for own in stats),
        "draft_versions": list(dict.fromkeys(version for own in stats for version in own.draft_versions)),
    }


class CompletionReplies:
    """The bodies of /v1/completions; `logprobs` tells whether they were asked for."""

    object, chunk_object = "text_completion", "text_completion"
    opening: tuple[Json, ...] = ()

    def __init__(self, head: Head, codec: TextCodec, answers: int, logprobs: bool) -> None:
        self.head, self.codec, self.logprobs = head, codec, logprobs
        self._offsets = [0] * answers

    def choice(self, gain: Gain) -> Json:
        """A finished answer."""
        return self._choice(gain)

    def delta(self, gain: Gain) -> Json:
        """A piece of an answer; pieces of one answer are asked for in order."""
        return self._choice(gain)

    def _choice(self, gain: Gain) -> Json:
        found = self._logprobs(gain) if self.logprobs else None
        ids = {"token_ids": list(gain.token_ids)} if self.codec.tokenizer is None else {}  # there is no text
        return {"index": gain.choice, "text": gain.text, **ids, "logprobs": found, "finish_reason": gain.finish_reason}

    def _logprobs(self, gain: Gain) -> Json:
        texts, offsets = [], []
        for entry in gain.logprobs:
            texts.append(self.codec.token_text(entry.token))
            offsets.append(self._offsets[gain.choice])
            self._offsets[gain.choice] += len(texts[-1])
        best = [{self.codec.token_text(t): _finite(v) for t, v in entry.best.items()} for entry in gain.logprobs]
        return {
            "tokens": texts,
            "token_logprobs": [_finite(entry.logprob) for entry in gain.logprobs],
            "top_logprobs": best if any(best) else None,
            "text_offset": offsets,
        }


class ChatReplies:
    """The bodies of /v1/chat/completions."""

    object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, head: Head, codec: TextCodec, answers: int, logprobs: bool) -> None:
        self.head, self.codec, self.logprobs = head, codec, logprobs
        # A stream says first who speaks.
        begun = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        self.opening: tuple[Json, ...] = tuple({"index": index, **begun} for index in range(answers))

    def choice(self, gain: Gain) -> Json:
        """A finished answer."""
        message = {"role": "assistant", "content": gain.text, "refusal": None}
        return {"index": gain.choice, "message": message, **self._rest(gain)}

    def delta(self, gain: Gain) -> Json:
        """A piece of an answer."""
        return {"index": gain.choice, "delta": {"content": gain.text} if gain.text else {}, **self._rest(gain)}

    def _rest(self, gain: Gain) -> Json:
        found = {"content": [self._logprob(entry) for entry in gain.logprobs]} if self.logprobs else None
        return {"logprobs": found, "finish_reason": gain.finish_reason}

    def _logprob(self, entry: TokenLogprob) -> Json:
        best = [self._token(token, value) for token, value in entry.best.items()]
        return {**self._token(entry.token, entry.logprob), "top_logprobs": best}

    def _token(self, token: int, logprob: float) -> Json:
        text, spelt = self.codec.token_text(token), self.codec.token_bytes(token)
        return {"token": text, "logprob": _finite(logprob), "bytes": spelt}


Replies = CompletionReplies | ChatReplies


def whole(replies: Replies, choices: Sequence[Json], outputs: Sequence[RequestOutput]) -> Json:
    """The body of an answer that is not streamed."""
    head = replies.head
    return {
        "id": head.id,
        "object": replies.object,
        "created": head.created,
        "model": head.model,
        "choices": list(choices),
        "usage": usage(outputs),
        "speculation": speculation(outputs),
    }


def chunk(replies: Replies, choices: Sequence[Json], **more: Any) -> Json:
    """One event of a stream."""
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
