"""Conversion of request bodies to the engine's SamplingParams."""

from __future__ import annotations

import re
from typing import Any

from distillspec.errors import ConfigError
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.server.http.errors import bad_request
from distillspec.serving.server.http.schemas import ChatBody, CompletionBody, GenerationBody

SAME_NAME = (
    "n",
    "temperature",
    "top_p",
    "seed",
    "stop",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "top_k",
    "min_p",
    "repetition_penalty",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "bad_words",
    "allowed_token_ids",
)


def completion_params(body: CompletionBody) -> SamplingParams:
    """Return the sampling parameters of a body. Raise ApiError 400 if its values exclude each other."""
    return _params(body, max_tokens=body.max_tokens, logprobs=body.logprobs)


def chat_params(body: ChatBody) -> SamplingParams:
    """Return the sampling parameters of a body. Raise ApiError 400 if its values exclude each other."""
    limit = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    return _params(body, max_tokens=limit, logprobs=(body.top_logprobs or 0) if body.logprobs else None)


def _params(body: GenerationBody, **others: Any) -> SamplingParams:
    speculation = body.speculation_options
    given = {name: value for name in SAME_NAME if (value := getattr(body, name)) is not None}
    try:
        return SamplingParams(
            **given,
            **others,
            speculate=speculation.enabled,
            speculation_length=speculation.speculation_length,
            require_exact=speculation.require_exact,
        )
    except ConfigError as error:
        named = re.match(r"[a-z_]+", str(error))
        raise bad_request(str(error), named[0] if named else None, "invalid_value") from error
