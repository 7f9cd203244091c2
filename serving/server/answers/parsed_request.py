"""A generation request between its HTTP body and the engine: checks, token ids, engine requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from distillspec.errors import ConfigError
from distillspec.serving.base.params import SamplingParams
from distillspec.serving.base.requests import Request
from distillspec.serving.server.answers.app_state import AppState
from distillspec.serving.server.http.errors import bad_request, not_found
from distillspec.serving.server.http.schemas import GenerationBody


@dataclass(frozen=True)
class ParsedRequest:
    """A generation request as its route understood it."""

    body: GenerationBody
    params: SamplingParams
    prompts: Sequence[Any]  # text, token ids or messages, as the client sent them
    encode: Callable[[Any], tuple[int, ...]]  # tokenises one prompt
    param: str  # the body's field of the prompts, for errors
    tenant: str

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.params.n


def check_model(state: AppState, name: str | None) -> None:
    """Raise ApiError 404 if this server has no model of that name. None means the served one."""
    if name is not None and name != state.model:
        raise not_found(
            f"the model {name[:200]!r} does not exist here; this server has {state.model!r}", "model_not_found"
        )


def check_request(state: AppState, parsed: ParsedRequest) -> None:
    """Raise ApiError 400 for anything that can be refused before text is tokenised."""
    config, options = state.config, parsed.body.speculation_options
    if parsed.params.n > config.max_n:
        raise bad_request(f"n={parsed.params.n} is above server.max_n={config.max_n}; send several requests", "n")
    if (count := len(parsed.prompts)) > config.max_prompts:
        problem = f"{count} prompts are above server.max_prompts={config.max_prompts}; send several requests"
        raise bad_request(problem, parsed.param)
    if not parsed.prompts:
        raise bad_request("the prompt is empty; give at least one token", parsed.param)
    for prompt in parsed.prompts:
        state.codec.check_fits(prompt, parsed.param)
    if options.max_time_per_token_s is not None and state.engine.settings.controller != "goodput":
        problem = "speculation.max_time_per_token_s needs a server with engine.controller=goodput"
        raise bad_request(problem, "speculation.max_time_per_token_s")
    if refusal := parsed.params.refused_by(state.engine.settings.verification):
        raise bad_request(refusal, "speculation.require_exact")
    _check_draft(state, options.draft)


def tokenise(state: AppState, parsed: ParsedRequest) -> ParsedRequest:
    """Replace prompts and bad words by token ids. May take seconds: call it in a thread."""
    ids = [parsed.encode(prompt) for prompt in parsed.prompts]
    try:
        banned = state.engine.sequences.bad_words(parsed.params)
    except ConfigError as error:
        without_text = state.engine.sequences.tokenizer is None
        param = "stop" if without_text and parsed.params.stop else "bad_words"
        raise bad_request(str(error), param, "invalid_value") from error
    params = replace(parsed.params, bad_words=(), bad_word_ids=banned)
    state.engine.sequences.bad_words(params)  # cached by `params`, so that the event loop never sorts them
    return replace(parsed, prompts=ids, params=params)


def engine_requests(state: AppState, tokenised: ParsedRequest, head_id: str) -> list[Request]:
    """Make one engine request of each prompt, with the ids `head_id.0`, `head_id.1`, …"""
    options = tokenised.body.speculation_options
    domain = state.domains.label_of(options.domain)
    return [
        Request(
            f"{head_id}.{index}",
            ids,
            tokenised.params,
            deadline_s=state.config.deadline_s,
            tenant=tokenised.tenant,  # from the key alone: nothing in the body can name another
            cache_salt=tokenised.body.cache_salt or "",
            domain=domain,
            log=options.log,
            max_time_per_token_s=options.max_time_per_token_s,
        )
        for index, ids in enumerate(tokenised.prompts)
    ]


def _check_draft(state: AppState, version: str | None) -> None:
    """Raise ApiError 400 if the request names a draft version that is not in use."""
    if version is None:
        return
    current = [draft.identity.version for draft in tuple(state.engine.drafts.values())]  # its thread may load another
    if version not in current:
        problem = f"speculation.draft={version!r} is not the draft in use ({', '.join(current) or 'none'})"
        raise bad_request(problem, "speculation.draft")
