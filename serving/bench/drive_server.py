"""Drive a server over HTTP with a load, and record answers as its clients see them."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import httpx

from distillspec.serving.base.params import SamplingParams
from distillspec.serving.bench.answer_stream import AnswerStream, StreamFailed
from distillspec.serving.bench.load import Arrival, Question
from distillspec.serving.bench.records import LoadRecord, RequestRecord
from distillspec.serving.bench.servers import Server, speculation_counts

KEEP_ALIVE_S = 2.0  # vLLM and others close idle connections after 5 s, and one reused just then would fail


def drive_server(
    server: Server,
    arrivals: Sequence[Arrival[Question]],
    timeout_s: float,
    *,
    on_progress: Callable[[int], None] = lambda done: None,
) -> LoadRecord:
    """Send every arrival at its time, and wait until all are answered or have failed.

    Refused requests (429 among them) are counted and not repeated, so that the load is the same for every server.

    Args:
        server: from `find_server`.
        arrivals: the load.
        timeout_s: for one answer.
        on_progress: called with the number of ended requests.
    """
    before = speculation_counts(server)
    record = asyncio.run(_drive(server, arrivals, timeout_s, on_progress))
    rate = speculation_counts(server).rate_since(before)
    return LoadRecord(record.requests, (), record.seconds, record.failed, record.errors, rate)


async def _drive(
    server: Server, arrivals: Sequence[Arrival[Question]], timeout_s: float, on_progress: Callable[[int], None]
) -> LoadRecord:
    requests: list[RequestRecord] = []
    errors: Counter[str] = Counter()
    limits = httpx.Limits(keepalive_expiry=KEEP_ALIVE_S)
    async with httpx.AsyncClient(timeout=timeout_s, limits=limits, **server.settings) as client:
        start = time.perf_counter()

        async def one(place: int, arrival: Arrival[Question]) -> None:
            await asyncio.sleep(arrival.at_s - (time.perf_counter() - start))
            try:
                async with asyncio.timeout(timeout_s):
                    answer = await _ask(client, server, arrival, start)
                requests.append(_record(place, arrival, answer))
            except StreamFailed as error:
                errors[str(error)] += 1
            except (TimeoutError, httpx.TimeoutException):
                errors[f"no whole answer within {timeout_s:g} s"] += 1
            except httpx.HTTPError as error:
                errors[f"the connection failed: {type(error).__name__}"] += 1
            on_progress(len(requests) + errors.total())

        async with asyncio.TaskGroup() as group:
            for place, arrival in enumerate(arrivals):
                group.create_task(one(place, arrival))
        seconds = time.perf_counter() - start
    return LoadRecord(tuple(requests), (), seconds, errors.total(), dict(errors))


async def _ask(client: httpx.AsyncClient, server: Server, arrival: Arrival[Question], start: float) -> AnswerStream:
    answer = AnswerStream()
    async with client.stream("POST", f"{server.base}/chat/completions", json=body_of(server, arrival)) as reply:
        if reply.status_code != 200:
            raise StreamFailed.refused(reply.status_code, await reply.aread())
        async for line in reply.aiter_lines():
            answer.read(line, time.perf_counter() - start)
    answer.check_whole()
    return answer


def body_of(server: Server, arrival: Arrival[Question]) -> dict[str, Any]:
    """Return the body of a request. Parameters that OpenAI's interface lacks (vLLM's names) are sent only if set."""
    return {
        "model": server.model,
        "messages": list(arrival.prompt.messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": arrival.params.max_tokens,
        "temperature": arrival.params.temperature,
        "top_p": arrival.params.top_p,
        **_extensions(arrival.params),
    }


def _extensions(params: SamplingParams) -> dict[str, Any]:
    extensions = {"top_k": params.top_k, "min_p": params.min_p, "ignore_eos": params.ignore_eos}
    return {name: value for name, value in extensions.items() if value}


def _record(place: int, arrival: Arrival[Question], answer: AnswerStream) -> RequestRecord:
    assert answer.first_s is not None
    assert answer.last_s is not None
    return RequestRecord(
        id=f"load-{place}",
        domain=arrival.prompt.domain,
        arrived_s=arrival.at_s,
        first_token_s=answer.first_s,
        finished_s=answer.last_s,
        prompt_tokens=answer.prompt_tokens,
        output_tokens=answer.output_tokens,
        proposed=answer.proposed,
        accepted=answer.accepted,
    )
