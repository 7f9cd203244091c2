"""One generation over HTTP: submit, then stream what comes or collect it; then a line in the log."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from distillspec.errors import ConfigError
from distillspec.serving.detokenize import Detokenizer
from distillspec.serving.params import SamplingParams
from distillspec.serving.requests import Request
from distillspec.serving.server.errors import ApiError, bad_request, not_found
from distillspec.serving.server.logs import access
from distillspec.serving.server.parts import Parts
from distillspec.serving.server.replies import Head, Json, Replies, chunk, speculation, usage, whole
from distillspec.serving.server.schemas import GenerationBody
from distillspec.serving.server.stream import DONE, EventStream, event, unless_disconnected
from distillspec.serving.server.ticket import Gain, Ticket

CLIENT_LEFT = 499  # nginx's status for a client that went away


@dataclass(frozen=True)
class Wanted:
    """What a route made of a body."""

    body: GenerationBody
    params: SamplingParams
    prompts: Sequence[Any]  # text, token ids or messages, as they came
    encode: Callable[[Any], tuple[int, ...]]  # what makes token ids of one of them
    param: str  # the field that the prompts came from, for errors
    tenant: str

    @property
    def answers(self) -> int:
        return len(self.prompts) * self.params.n


def check_model(parts: Parts, name: str | None) -> None:
    """404 for a model that is not served here."""
    if name is not None and name != parts.model:
        raise not_found(
            f"the model {name[:200]!r} does not exist here; this server has {parts.model!r}", "model_not_found"
        )


def new_head(parts: Parts, prefix: str) -> Head:
    return Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), parts.model)


async def answer(parts: Parts, http: HttpRequest, wanted: Wanted, replies: Replies) -> Response:
    """The response to a generation request.

    Raises:
        ApiError: refused, cut off, or failed before anything was sent.
    """
    _check_counts(parts, wanted)
    _check_draft(parts, wanted.body.wish.draft)
    with parts.bridge.reading(wanted.answers, wanted.tenant):
        read = await unless_disconnected(http.receive, parts.reading(lambda: _tokenised(parts, wanted)))
    if read is None:
        return Response(status_code=CLIENT_LEFT)
    generation = Generation(parts, read, replies, _requests(parts, read, replies.head.id))
    parts.domains.accepted(wanted.body.wish.domain)
    if wanted.body.stream:
        return EventStream(generation.events(), generation.close)
    try:
        body = await unless_disconnected(http.receive, generation.collect())
    finally:
        generation.close()
    return Response(status_code=CLIENT_LEFT) if body is None else JSONResponse(body)


class Generation:
    """A running generation; must be closed, which ends what still runs and writes the log line."""

    def __init__(self, parts: Parts, wanted: Wanted, replies: Replies, requests: Sequence[Request]) -> None:
        self.parts, self.wanted, self.replies = parts, wanted, replies
        self._open = ExitStack()
        self._span = self._open.enter_context(parts.tracing.span(**{"gen_ai.request.model": parts.model}))
        try:
            self.ticket: Ticket = self._open.enter_context(parts.bridge.open(requests, wanted.param))
        except BaseException:
            self._open.close()
            raise
        self._traced = wanted.body.wish.trace
        self._shows_ids = parts.codec.tokenizer is None
        self._texts: dict[int, Detokenizer] = {}
        self._began = time.monotonic()
        self._failure: str | None = None
        self._closed = False

    def close(self) -> None:
        """End what still runs; more calls do nothing."""
        if not self._closed:
            self._closed = True
            self._log(list(self.ticket.outputs.values()))
            self._open.close()

    async def collect(self) -> Json:
        """The body, when everything is finished."""
        merged: dict[int, Gain] = {}
        while gains := await self._take():
            for gain in gains:
                before = merged.get(gain.choice)
                merged[gain.choice] = gain if before is None else before.and_then(gain)
        choices = [self._with_trace(self.replies.choice(merged[i]), merged[i]) for i in range(self.ticket.answers)]
        return whole(self.replies, choices, self._outputs())

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a stream, to [DONE]; a failure in the middle is an event too."""
        usual = self.wanted.body.wants_usage
        more: Json = {"usage": None} if usual else {}
        try:
            for opening in self.replies.opening:
                yield event(chunk(self.replies, [opening], **more))
            while gains := await self._take():
                last = self.ticket.done
                for place, gain in enumerate(gains, 1):
                    extra = {"speculation": speculation(self._outputs())} if last and place == len(gains) else {}
                    if gain.text or gain.finish_reason is not None or gain.logprobs or self._traced or self._shows_ids:
                        choice = self._with_trace(self.replies.delta(gain), gain)
                        yield event(chunk(self.replies, [choice], **more, **extra))
            if usual:
                yield event(chunk(self.replies, [], usage=usage(self._outputs())))
        except ApiError as error:
            yield event(error.body)
        yield DONE

    async def _take(self) -> list[Gain]:
        try:
            gains = await self.ticket.take()
            for gain in gains:
                _check_whole(gain, self.parts.config.deadline_s)
        except ApiError as error:
            self._failure = error.code
            raise
        return gains

    def _outputs(self) -> list[Any]:
        return [self.ticket.outputs[request.id] for request in self.ticket.requests]

    def _with_trace(self, choice: Json, gain: Gain) -> Json:
        """Where each token came from, with the text it made certain."""
        if not self._traced:
            return choice
        if gain.choice not in self._texts:
            request = self.ticket.requests[gain.choice // self.wanted.params.n]
            tokenizer = self.parts.codec.tokenizer
            self._texts[gain.choice] = Detokenizer(tokenizer, request.prompt_ids, self.wanted.params.stop)
        text = self._texts[gain.choice]
        tokens = [
            {"id": token, "kind": kind, "text": "" if text.stopped_by is not None else text.add(token)}
            for token, kind in zip(gain.token_ids, gain.kinds, strict=True)
        ]
        return {**choice, "speculation": {"tokens": tokens}}

    def _log(self, outputs: Sequence[Any]) -> None:
        finished = self.ticket.done
        if not finished and self._failure is None:
            self.parts.metrics.disconnects.inc()
        stats = [output.stats for output in outputs]
        first = [s.time_to_first_token_s for s in stats if s.time_to_first_token_s is not None]
        counts = usage(outputs)
        fields = {
            "event": "generation",
            "id": self.replies.head.id,
            "tenant": self.wanted.tenant,
            "user": self.wanted.body.user,
            "stream": bool(self.wanted.body.stream),
            "outcome": "done" if finished and self._failure is None else self._failure or "client_left",
            "prompt_tokens": counts["prompt_tokens"],
            "completion_tokens": counts["completion_tokens"],
            "first_token_s": min(first) if first else None,
            "seconds": round(time.monotonic() - self._began, 4),
            "proposed": sum(a.stats.proposed for o in outputs for a in o.completions),
            "accepted": sum(a.stats.accepted for o in outputs for a in o.completions),
        }
        access.info("generation", extra={"fields": fields})
        self._span.update(
            {
                "gen_ai.usage.input_tokens": counts["prompt_tokens"],
                "gen_ai.usage.output_tokens": counts["completion_tokens"],
                "distillspec.outcome": fields["outcome"],
            }
        )


def _check_counts(parts: Parts, wanted: Wanted) -> None:
    """Everything that can be refused before text is tokenised."""
    config = parts.config
    if wanted.params.n > config.max_n:
        raise bad_request(f"n={wanted.params.n} is above {config.max_n}, the most this server writes a prompt", "n")
    if len(wanted.prompts) > config.max_prompts:
        raise bad_request(
            f"{len(wanted.prompts)} prompts in one request; the most is {config.max_prompts}", wanted.param
        )
    if not wanted.prompts:
        raise bad_request("the prompt is empty; give at least one token", wanted.param)
    for prompt in wanted.prompts:
        parts.codec.check_fits(prompt, wanted.param)
    if wanted.body.wish.max_time_per_token_s is not None and parts.engine.settings.controller != "goodput":
        problem = "speculation.max_time_per_token_s needs a server with engine.controller=goodput"
        raise bad_request(problem, "speculation.max_time_per_token_s")


def _tokenised(parts: Parts, wanted: Wanted) -> Wanted:
    """The same with token ids in place of prompts and bad words; takes its time."""
    ids = [wanted.encode(prompt) for prompt in wanted.prompts]
    try:
        banned = parts.engine.core.roster.bad_words(wanted.params)
    except ConfigError as error:
        raise bad_request(str(error), "bad_words", "invalid_value") from error
    params = replace(wanted.params, bad_words=(), bad_word_ids=banned)
    parts.engine.core.roster.bad_words(params)  # kept by `params`, so that no prompt sorts them on the event loop
    return replace(wanted, prompts=ids, params=params)


def _requests(parts: Parts, wanted: Wanted, head_id: str) -> list[Request]:
    wish, domain = wanted.body.wish, parts.domains.told_apart(wanted.body.wish.domain)
    return [
        Request(
            f"{head_id}.{place}",
            ids,
            wanted.params,
            deadline_s=parts.config.deadline_s,
            tenant=wanted.tenant,  # from the key alone: nothing in the body can name another
            cache_salt=wanted.body.cache_salt or "",
            domain=domain,
            log=wish.log,
            max_time_per_token_s=wish.max_time_per_token_s,
        )
        for place, ids in enumerate(wanted.prompts)
    ]


def _check_draft(parts: Parts, wanted: str | None) -> None:
    """A request may insist on the draft in use; there is only one at a time."""
    current = None if parts.engine.draft is None else parts.engine.draft.identity.version
    if wanted is not None and wanted != current:
        problem = f"speculation.draft={wanted!r} is not the draft in use ({current or 'none'})"
        raise bad_request(problem, "speculation.draft")


def _check_whole(gain: Gain, deadline_s: float) -> None:
    """An answer that ended for no reason of its own is no answer."""
    if gain.finish_reason == "abort":
        raise ApiError(
            504,
            f"the answer was not finished within {deadline_s:g} s (server.deadline_s)",
            kind="server_error",
            code="deadline_exceeded",
        )
    if gain.finish_reason == "error":
        raise ApiError(500, f"the answer could not be finished: {gain.error}", kind="server_error", code="model_error")
