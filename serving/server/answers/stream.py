"""Server-sent events that end when the client goes away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")
HEADERS = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}  # proxies must not collect events


_as_json = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":")
).encode  # built once: building it is half of the cost of an event


def event(data: Any) -> bytes:
    """Encode data as one server-sent event of JSON."""
    return b"data: " + _as_json(data).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(Response):
    """Response that sends events as they come, no faster than the client reads them.

    It ends, and calls `on_end`, as soon as the client disconnects or `protocol` cuts off a client that reads nothing.
    Unsent events are dropped.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None] = lambda: None) -> None:
        self.status_code, self.background = 200, None
        self.init_headers(HEADERS)
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send_all(send))
        leaving = asyncio.ensure_future(disconnected(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (sending, leaving):
                task.cancel()
            await asyncio.gather(sending, leaving, return_exceptions=True)
            self._on_end()
        if not sending.cancelled() and (problem := sending.exception()) is not None:
            raise problem

    async def _send_all(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            async for piece in self._events:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self._events.aclose()


CLIENT_LEFT = 499  # nginx's status for a client that went away


async def disconnected(receive: Receive) -> None:
    """Return when the client has disconnected. The request's body must be read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T | None:
    """Return the result of `work`, or None if the client disconnected first. `work` is cancelled then."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(disconnected(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        return working.result() if working.done() else None
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)
