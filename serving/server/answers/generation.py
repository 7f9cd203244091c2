"""One generation over HTTP: submit, stream or collect the answer, write the log line."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import Counter
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from distillspec.serving.base.requests import Request, RequestOutput
from distillspec.serving.sequences.detokenize import Detokenizer
from distillspec.serving.server.answers.app_state import AppState
from distillspec.serving.server.answers.parsed_request import ParsedRequest, check_request, engine_requests, tokenise
from distillspec.serving.server.answers.replies import Head, Json, Replies, chunk, full_body, speculation, usage
from distillspec.serving.server.answers.stream import CLIENT_LEFT, DONE, EventStream, event, unless_disconnected
from distillspec.serving.server.bridge.request_stream import Delta, RequestStream
from distillspec.serving.server.http.errors import ApiError
from distillspec.serving.server.observability.logs import access

FAILED = ("abort", "error")  # finish reasons of answers that were not written to their end


def new_head(state: AppState, prefix: str) -> Head:
    """Return the head of a new answer, with a fresh id."""
    return Head(f"{prefix}-{uuid.uuid4().hex}", int(time.time()), state.model, state.engine.settings.verification)


async def answer(state: AppState, http: HttpRequest, parsed: ParsedRequest, replies: Replies) -> Response:
    """Return the response to a generation request.

    Raises:
        ApiError: the request was refused, or its answer was aborted or failed before anything was sent.
    """
    check_request(state, parsed)
    with state.bridge.reserve(parsed.answers, parsed.tenant):
        work = state.in_tokenizer_thread(lambda: tokenise(state, parsed), parsed.tenant)
        tokenised = await unless_disconnected(http.receive, work)
    if tokenised is None:
        return Response(status_code=CLIENT_LEFT)
    generation = Generation(state, tokenised, replies, engine_requests(state, tokenised, replies.head.id))
    state.domains.accept(parsed.body.speculation_options.domain)
    if parsed.body.stream:
        return EventStream(generation.events(), generation.close)
    try:
        response = await unless_disconnected(http.receive, generation.collect())
    finally:
        generation.close()
    return Response(status_code=CLIENT_LEFT) if response is None else response


class Generation:
    """A running generation. `close` must be called: it aborts unfinished answers and writes the log line."""

    def __init__(self, state: AppState, parsed: ParsedRequest, replies: Replies, requests: Sequence[Request]) -> None:
        self.state = state
        self.parsed = parsed
        self.replies = replies
        self._open = ExitStack()
        self._span = self._open.enter_context(state.tracing.span(**{"gen_ai.request.model": state.model}))
        try:
            self.stream: RequestStream = self._open.enter_context(state.bridge.open(requests, parsed.param))
        except BaseException:
            self._open.close()
            raise
        self._traced = parsed.body.speculation_options.trace
        self._shows_ids = state.codec.tokenizer is None
        self._detokenizers: dict[int, Detokenizer] = {}
        self._counts = Counter[int]()  # traced tokens of each choice
        self._started_s = time.monotonic()
        self._failure: str | None = None
        self._closed = False

    def close(self) -> None:
        """Abort unfinished answers and write the log line. Further calls do nothing."""
        if not self._closed:
            self._closed = True
            self._log()
            self._open.close()

    async def collect(self) -> Response:
        """Wait for all answers and return them. Bodies with log-probabilities are large: another thread writes them."""
        merged: dict[int, Delta] = {}
        while deltas := await self._take():
            if problem := self._problem(deltas):
                raise problem
            for delta in deltas:
                earlier = merged.get(delta.choice)
                merged[delta.choice] = delta if earlier is None else earlier.and_then(delta)
        if self.parsed.params.logprobs is None:
            return self._whole(merged)
        return await asyncio.to_thread(self._whole, merged)

    def _whole(self, merged: Mapping[int, Delta]) -> Response:
        choices = [self._with_trace(self.replies.choice(merged[i]), merged[i]) for i in range(self.stream.answers)]
        return JSONResponse(full_body(self.replies, choices, self._outputs()))

    async def events(self) -> AsyncGenerator[bytes]:
        """Yield the events of a stream, up to [DONE]. A failure in the middle is an event too."""
        with_usage = self.parsed.body.wants_usage
        more: Json = {"usage": None} if with_usage else {}
        try:
            for opening in self.replies.opening:
                yield event(chunk(self.replies, [opening], **more))
            while deltas := await self._take():
                problem = self._problem(deltas)
                last = self.stream.done and problem is None
                for number, delta in enumerate(deltas, 1):
                    extra = (
                        {"speculation": speculation(self.replies, self._outputs())}
                        if last and number == len(deltas)
                        else {}
                    )
                    written = replace(delta, finish_reason=None) if delta.finish_reason in FAILED else delta
                    if self._is_shown(written):
                        choice = self._with_trace(self.replies.delta(written), written)
                        yield event(chunk(self.replies, [choice], **more, **extra))
                if problem is not None:
                    raise problem
            if with_usage:
                yield event(chunk(self.replies, [], usage=usage(self._outputs())))
        except ApiError as error:
            yield event(error.body)
        yield DONE

    async def _take(self) -> list[Delta]:
        try:
            return await self.stream.take()
        except ApiError as error:
            self._failure = error.code
            raise

    def _problem(self, deltas: Sequence[Delta]) -> ApiError | None:
        """Return the first answer's failure, None if none has failed."""
        failed = [delta for delta in deltas if delta.finish_reason in FAILED]
        if not failed:
            return None
        problem = _failure_of(failed[0], self.state.config.deadline_s)
        self._failure = problem.code
        return problem

    def _is_shown(self, delta: Delta) -> bool:
        """False for a delta that would be an empty event: its tokens made no text certain yet."""
        has_content = bool(delta.text or delta.logprobs) or delta.finish_reason is not None
        return has_content or self._traced or self._shows_ids

    def _outputs(self) -> list[RequestOutput]:
        return [self.stream.outputs[request.id] for request in self.stream.requests]

    def _with_trace(self, choice: Json, delta: Delta) -> Json:
        """Add each token's kind, source, and the text it made certain, if the client requested the trace."""
        if not self._traced:
            return choice
        if delta.choice not in self._detokenizers:
            request = self.stream.requests[delta.choice // self.parsed.params.n]
            tokenizer = self.state.codec.tokenizer
            self._detokenizers[delta.choice] = Detokenizer(tokenizer, request.prompt_ids, self.parsed.params.stop)
        tokens = [
            {"id": token, "kind": kind, "source": source, "text": self._text_of(delta.choice, token)}
            for token, kind, source in zip(delta.token_ids, delta.kinds, delta.sources, strict=True)
        ]
        return {**choice, "speculation": {"tokens": tokens}}

    def _text_of(self, choice: int, token: int) -> str:
        """Return the text that a choice's next token makes certain, as in its answer."""
        detokenizer, params = self._detokenizers[choice], self.parsed.params
        self._counts[choice] += 1
        may_stop = self._counts[choice] >= params.min_tokens
        if detokenizer.stopped_by is not None or (may_stop and token in params.stop_token_ids):
            return ""
        return detokenizer.add(token, may_stop)

    def _log(self) -> None:
        finished = self.stream.done
        if not finished and self._failure is None:
            self.state.metrics.disconnects.inc()
        outcome = "done" if finished and self._failure is None else self._failure or "client_left"
        stream, first_s = self.stream, self.stream.first_token_s
        prompt_tokens = sum([len(request.prompt_ids) for request in stream.requests])
        fields = {
            "event": "generation",
            "id": self.replies.head.id,
            "tenant": self.parsed.tenant,
            "user": self.parsed.body.user,
            "stream": bool(self.parsed.body.stream),
            "outcome": outcome,
            "prompt_tokens": prompt_tokens,
            "completion_tokens": stream.written,
            "first_token_s": None if first_s is None else round(first_s - self._started_s, 4),
            "seconds": round(time.monotonic() - self._started_s, 4),
            "proposed": stream.proposed,
            "accepted": stream.accepted,
        }
        access.info("generation", extra={"fields": fields})
        self._span.update(
            {
                "gen_ai.usage.input_tokens": prompt_tokens,
                "gen_ai.usage.output_tokens": stream.written,
                "distillspec.outcome": outcome,
            }
        )


def _failure_of(delta: Delta, deadline_s: float) -> ApiError:
    """Return the error of an answer that was aborted (504) or failed (500)."""
    if delta.finish_reason == "abort":
        return ApiError(
            504,
            f"the answer was not finished within {deadline_s:g} s (server.deadline_s)",
            kind="server_error",
            code="deadline_exceeded",
        )
    return ApiError(500, f"the answer could not be finished: {delta.error}", kind="server_error", code="model_error")
